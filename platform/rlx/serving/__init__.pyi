from .app import (
    ClientGoneError,
    build_app,
    build_fault,
    create_app,
    send_answer,
    wait_for_outcome,
)
from .batcher import Batcher, Outcome, QueueFullError, SampledCompletion, SamplingJob
from .protocol import ChatMessage, ChatRequest, TextRequest
from .responses import ChatAnswer, TextAnswer, list_models
from .served_model import (
    InvalidRequestError,
    Reply,
    ReplyToken,
    ServedModel,
    ServedPolicy,
    TokenizedPrompt,
    refuse_for,
)

__all__ = [
    "Batcher",
    "ChatAnswer",
    "ChatMessage",
    "ChatRequest",
    "ClientGoneError",
    "InvalidRequestError",
    "Outcome",
    "QueueFullError",
    "Reply",
    "ReplyToken",
    "SampledCompletion",
    "SamplingJob",
    "ServedModel",
    "ServedPolicy",
    "TextAnswer",
    "TextRequest",
    "TokenizedPrompt",
    "build_app",
    "build_fault",
    "create_app",
    "list_models",
    "refuse_for",
    "send_answer",
    "wait_for_outcome",
]
