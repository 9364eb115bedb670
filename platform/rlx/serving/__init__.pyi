from .app import create_app
from .batcher import Batcher, QueueFullError, SampledCompletion, SamplingJob
from .protocol import ChatRequest, TextRequest
from .served_model import InvalidRequestError, Reply, ReplyToken, ServedModel

__all__ = [
    "Batcher",
    "ChatRequest",
    "InvalidRequestError",
    "QueueFullError",
    "Reply",
    "ReplyToken",
    "SampledCompletion",
    "SamplingJob",
    "ServedModel",
    "TextRequest",
    "create_app",
]
