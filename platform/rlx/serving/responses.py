"""Builds OpenAI's responses as plain JSON, whole or as a stream with one chunk for each choice."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rlx.serving.batcher import SampledCompletion
from rlx.serving.protocol import ChatRequest, TextRequest
from rlx.serving.served_model import (
    LEAST_LOGPROB,
    Reply,
    ReplyToken,
    ServedModel,
    TokenizedPrompt,
)

Groups = Sequence[tuple[SampledCompletion, ...]]
Json = dict[str, Any]


def list_models(model: ServedModel, created: int = 0) -> Json:
    """The response of `/v1/models`. Not OpenAI's: the maximum length of a dialogue, in tokens."""
    card = {"id": model.name, "object": "model", "created": created, "owned_by": "rlx"}
    return {"object": "list", "data": [{**card, "max_model_len": model.context_length}]}


def count_usage(groups: Groups) -> Json:
    """Counts the tokens of prompts, each once, and of all completions."""
    prompt = sum(len(group[0].context) for group in groups)
    completion = sum(len(one.completion.token_ids) for group in groups for one in group)
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


@dataclass(frozen=True)
class Answer(ABC):
    """The answer to a request, with what was sampled for each of its prompts."""

    model: ServedModel
    request: Any
    groups: Groups

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @cached_property
    def id(self) -> str:
        return f"{self.prefix}-{secrets.token_hex(12)}"

    @cached_property
    def created(self) -> int:
        return int(time.time())

    def build_response(self) -> Json:
        choices = [*self.list_choices("message")]
        return {**self._build_head(self.kind, choices), "usage": count_usage(self.groups)}

    def iterate_chunks(self) -> Iterator[Json]:
        for choice in self.list_choices("delta"):
            yield self._build_head(self.chunk_kind, [choice])
        if self.request.includes_usage:
            yield {**self._build_head(self.chunk_kind, []), "usage": count_usage(self.groups)}

    @abstractmethod
    def list_choices(self, name: str) -> Iterator[Json]:
        """Yields the choices; `name` is that of a chat's message."""

    def _build_head(self, kind: str, choices: list[Json]) -> Json:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}
        return {**head, "choices": choices}

    def _list_ids(self, reply: Reply) -> Json:
        if not self.request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(reply.prompt_ids), "token_ids": list(reply.token_ids)}


@dataclass(frozen=True)
class TextAnswer(Answer):
    request: TextRequest
    prompts: Sequence[TokenizedPrompt]

    prefix: ClassVar[str] = "cmpl"
    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def list_choices(self, name: str) -> Iterator[Json]:
        pairs = [
            (prompt, sampled)
            for prompt, group in zip(self.prompts, self.groups, strict=True)
            for sampled in group
        ]
        for index, (prompt, sampled) in enumerate(pairs):
            reply = self.model.read_completion(sampled, self.request.stop)
            before, tokens = "", [(token, token.start) for token in reply.tokens]
            if self.request.echo:
                before = prompt.text
                repeated = self.model.list_tokens(sampled, 0, prompt.starts)
                tokens = [(token, token.start) for token in repeated]
                tokens += [(token, len(before) + token.start) for token in reply.tokens]
            yield {
                "index": index,
                "text": before + reply.text,
                "logprobs": self._build_logprobs(tokens),
                "finish_reason": reply.finish_reason,
                **self._list_ids(reply),
            }

    def _build_logprobs(self, tokens: Sequence[tuple[ReplyToken, int]]) -> Json | None:
        if self.request.likeliest is None:
            return None
        likeliest = [self._format_likeliest(token) for token, _ in tokens]
        return {
            "tokens": [self.model.format_token(token.token_id) for token, _ in tokens],
            "token_logprobs": [token.logprob for token, _ in tokens],
            "top_logprobs": likeliest if self.request.likeliest > 0 else None,
            "text_offset": [offset for _, offset in tokens],
        }

    def _format_likeliest(self, token: ReplyToken) -> dict[str, float] | None:
        """The likeliest tokens by their texts, of which the likelier counts if two have one text,
        and the token itself; null where nothing stands before it."""
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for each, logprob in (*token.likeliest, (token.token_id, token.logprob)):
            found.setdefault(self.model.format_token(each), max(logprob, LEAST_LOGPROB))
        return found


@dataclass(frozen=True)
class ChatAnswer(Answer):
    request: ChatRequest

    prefix: ClassVar[str] = "chatcmpl"
    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    def list_replies(self) -> Iterator[tuple[Reply, Json]]:
        """Yields what was sampled for each choice, and the message that it is."""
        for sampled in self.groups[0]:
            reply = self.model.read_completion(sampled, self.request.stop)
            yield reply, self.model.parse_message(reply, self.request.offered_tools)

    def list_choices(self, name: str) -> Iterator[Json]:
        for index, (reply, message) in enumerate(self.list_replies()):
            calls = message.get("tool_calls", ())
            if calls and name == "delta":
                numbered = [{"index": number, **call} for number, call in enumerate(calls)]
                message["tool_calls"] = numbered
            yield {
                "index": index,
                name: message,
                "logprobs": self._build_logprobs(reply.tokens),
                "finish_reason": "tool_calls" if calls else reply.finish_reason,
                **self._list_ids(reply),
            }

    def _build_logprobs(self, tokens: Sequence[ReplyToken]) -> Json | None:
        if self.request.likeliest is None:
            return None
        content = [
            {
                **self._build_token(token.token_id, token.logprob or 0.0),
                "top_logprobs": [self._build_token(*each) for each in token.likeliest],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _build_token(self, token: int, logprob: float) -> Json:
        """A token with its log-probability; `bytes` is null for a control token."""
        content = self.model.get_bytes(token)
        return {
            "token": self.model.format_token(token),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": None if content is None else list(content),
        }
