from .strategies import (
    select_effective_tokens,
    select_model_tokens,
    select_response_tokens,
    select_span_tokens,
)

__all__ = [
    "select_effective_tokens",
    "select_model_tokens",
    "select_response_tokens",
    "select_span_tokens",
]
