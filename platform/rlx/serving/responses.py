"""Builds OpenAI's responses as plain JSON, whole or as the chunks of a stream."""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
class TextAnswer:
    """The answer to a completion request.

    Args:
        model: the model.
        request: the request.
        prompts: its prompts, and for each
        groups: what was sampled.
        id: of the response.
    """

    model: ServedModel
    request: TextRequest
    prompts: Sequence[TokenizedPrompt]
    groups: Groups
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")

    def build_response(self) -> Json:
        """Builds the whole response."""
        choices = [
            _join_parts([*self._list_parts(index, prompt, sampled)])
            for index, prompt, sampled in self._list_choices()
        ]
        return {**self._head(), "choices": choices, "usage": count_usage(self.groups)}

    def iterate_chunks(self) -> Iterator[Json]:
        """Yields the chunks of a stream: the prompt if it is repeated, a text for each token that
        completes one, and the reason for its end."""
        head = self._head()
        for index, prompt, sampled in self._list_choices():
            for part in self._list_parts(index, prompt, sampled):
                yield {**head, "choices": [part]}
        if self.request.includes_usage:
            yield {**head, "choices": [], "usage": count_usage(self.groups)}

    def _head(self) -> Json:
        return _build_head(self.id, "text_completion", self.model)

    def _list_choices(self) -> Iterator[tuple[int, TokenizedPrompt, SampledCompletion]]:
        index = 0
        for prompt, group in zip(self.prompts, self.groups, strict=True):
            for sampled in group:
                yield index, prompt, sampled
                index += 1

    def _list_parts(
        self, index: int, prompt: TokenizedPrompt, sampled: SampledCompletion
    ) -> Iterator[Json]:
        """Yields the parts of a choice; the last one has no text, but the reason for its end."""
        reply = self.model.read_completion(sampled, self.request.stop)
        before = 0
        if self.request.echo:
            tokens = self.model.list_prompt_tokens(sampled, prompt)
            yield self._build_part(index, prompt.text, tokens, 0)
            before = len(prompt.text)
        for text, tokens in reply.split_pieces():
            yield self._build_part(index, text, tokens, before)
        end = self._build_part(index, "", (), before)
        yield {**end, "finish_reason": reply.finish_reason, **_list_ids(self.request, reply)}

    def _build_part(self, index: int, text: str, tokens: Sequence[ReplyToken], before: int) -> Json:
        """A part of a choice, before whose own text there are `before` characters."""
        logprobs: Json | None = None
        if self.request.likeliest is not None:
            wanted = self.request.likeliest > 0
            logprobs = {
                "tokens": [self.model.format_token(token.token_id) for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [self._format_likeliest(t) for t in tokens] if wanted else None,
                "text_offset": [before + token.start for token in tokens],
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _format_likeliest(self, token: ReplyToken) -> dict[str, float] | None:
        """The likeliest tokens by their texts, of which the likelier counts if two have one text,
        and the token itself; null where nothing stands before it."""
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for each, logprob in (*token.likeliest, (token.token_id, token.logprob)):
            found.setdefault(self.model.format_token(each), max(logprob, LEAST_LOGPROB))
        return found


def _join_parts(parts: Sequence[Json]) -> Json:
    """Joins the parts of a choice, the last of which says how it ended."""
    joined = None
    if (last := parts[-1]["logprobs"]) is not None:
        joined = {
            name: None if last[name] is None else [v for p in parts for v in p["logprobs"][name]]
            for name in last
        }
    return {**parts[-1], "text": "".join(part["text"] for part in parts), "logprobs": joined}


@dataclass(frozen=True)
class ChatAnswer:
    """The answer to a chat request.

    Args:
        model: the model.
        request: the request.
        group: what was sampled, one for each choice.
        id: of the response.
    """

    model: ServedModel
    request: ChatRequest
    group: tuple[SampledCompletion, ...]
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")

    def build_response(self) -> Json:
        """Builds the whole response."""
        choices = [
            {
                "index": index,
                "message": message,
                "logprobs": self._build_logprobs(reply.tokens),
                **self._describe_end(reply, message),
            }
            for index, (reply, message) in enumerate(self.list_replies())
        ]
        head = _build_head(self.id, "chat.completion", self.model)
        return {**head, "choices": choices, "usage": count_usage([self.group])}

    def iterate_chunks(self) -> Iterator[Json]:
        """Yields the chunks of a stream: the role, a text for each token that completes one, or
        the content and the calls of a message with calls, and the reason for its end."""
        head = _build_head(self.id, "chat.completion.chunk", self.model)
        for index, (reply, message) in enumerate(self.list_replies()):
            choice = {"index": index, "logprobs": None, "finish_reason": None}
            for delta, tokens in _split_message(reply, message):
                logprobs = self._build_logprobs(tokens) if tokens else None
                yield {**head, "choices": [{**choice, "delta": delta, "logprobs": logprobs}]}
            end = {**choice, "delta": {}, **self._describe_end(reply, message)}
            yield {**head, "choices": [end]}
        if self.request.includes_usage:
            yield {**head, "choices": [], "usage": count_usage([self.group])}

    def list_replies(self) -> Iterator[tuple[Reply, Json]]:
        """Yields what was sampled for each choice, and the message that it is."""
        for sampled in self.group:
            reply = self.model.read_completion(sampled, self.request.stop)
            yield reply, self.model.parse_message(reply, self.request.offered_tools)

    def _describe_end(self, reply: Reply, message: Mapping[str, Any]) -> Json:
        reason = "tool_calls" if "tool_calls" in message else reply.finish_reason
        return {"finish_reason": reason, **_list_ids(self.request, reply)}

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


def _split_message(
    reply: Reply, message: Mapping[str, Any]
) -> Iterator[tuple[Json, Sequence[ReplyToken]]]:
    """Yields what a stream adds to a message, with the tokens that it is."""
    yield {"role": "assistant", "content": ""}, ()
    if message["content"] == reply.text:
        for text, tokens in reply.split_pieces():
            yield {"content": text}, tokens
        return
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
    names = ("content", "reasoning_content")
    delta: Json = {name: message[name] for name in names if message.get(name) is not None}
    yield {**delta, **({"tool_calls": calls} if calls else {})}, reply.tokens


def _list_ids(request: ChatRequest | TextRequest, reply: Reply) -> Json:
    if not request.return_token_ids:
        return {}
    return {"prompt_token_ids": list(reply.prompt_ids), "token_ids": list(reply.token_ids)}


def _build_head(response: str, kind: str, model: ServedModel) -> Json:
    return {"id": response, "object": kind, "created": int(time.time()), "model": model.name}
