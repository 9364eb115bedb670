"""Builds OpenAI's responses, whole or as the chunks of a stream."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.serving.batcher import SampledCompletion
from rlx.serving.protocol import (
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    ContentLogprob,
    FinishReason,
    MessageDelta,
    ReplyMessage,
    TextChoice,
    TextLogprobs,
    TextRequest,
    TextResponse,
    TokenLogprob,
    Usage,
)
from rlx.serving.served_model import (
    LEAST_LOGPROB,
    Reply,
    ReplyToken,
    ServedModel,
    TokenizedPrompt,
)

Groups = Sequence[tuple[SampledCompletion, ...]]


def count_usage(groups: Groups) -> Usage:
    """Counts the tokens of prompts, each once, and of all completions."""
    prompt = sum(len(group[0].context) for group in groups)
    completion = sum(len(one.completion.token_ids) for group in groups for one in group)
    return Usage(
        prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion
    )


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

    def build_response(self) -> TextResponse:
        """Builds the whole response."""
        choices = [
            _join_parts([*self._list_parts(index, prompt, sampled)])
            for index, prompt, sampled in self._list_choices()
        ]
        return TextResponse(**self._head(), choices=choices, usage=count_usage(self.groups))

    def iterate_chunks(self) -> Iterator[TextResponse]:
        """Yields the chunks of a stream: the prompt if it is repeated, a text for each token that
        completes one, and the reason for its end."""
        head = self._head()
        for index, prompt, sampled in self._list_choices():
            for part in self._list_parts(index, prompt, sampled):
                yield TextResponse(**head, choices=[part])
        if self.request.includes_usage:
            yield TextResponse(**head, choices=[], usage=count_usage(self.groups))

    def _head(self) -> dict[str, Any]:
        return _build_head(self.id, self.model)

    def _list_choices(self) -> Iterator[tuple[int, TokenizedPrompt, SampledCompletion]]:
        index = 0
        for prompt, group in zip(self.prompts, self.groups, strict=True):
            for sampled in group:
                yield index, prompt, sampled
                index += 1

    def _list_parts(
        self, index: int, prompt: TokenizedPrompt, sampled: SampledCompletion
    ) -> Iterator[TextChoice]:
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
        ids = {"prompt_token_ids": list(sampled.context), "token_ids": list(reply.token_ids)}
        given = ids if self.request.return_token_ids else {}
        yield end.model_copy(update={"finish_reason": reply.finish_reason, **given})

    def _build_part(
        self, index: int, text: str, tokens: Sequence[ReplyToken], before: int
    ) -> TextChoice:
        """A part of a choice, before whose own text there are `before` characters."""
        logprobs = None
        if self.request.likeliest is not None:
            wanted = self.request.likeliest > 0
            logprobs = TextLogprobs(
                tokens=[self.model.format_token(token.token_id) for token in tokens],
                token_logprobs=[token.logprob for token in tokens],
                top_logprobs=[self._format_likeliest(t) for t in tokens] if wanted else None,
                text_offset=[before + token.start for token in tokens],
            )
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=None)

    def _format_likeliest(self, token: ReplyToken) -> dict[str, float] | None:
        """The likeliest tokens by their texts, of which the likelier counts if two have one text,
        and the token itself; null where nothing stands before it."""
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for each, logprob in (*token.likeliest, (token.token_id, token.logprob)):
            found.setdefault(self.model.format_token(each), max(logprob, LEAST_LOGPROB))
        return found


def _join_parts(parts: Sequence[TextChoice]) -> TextChoice:
    """Joins the parts of a choice, the last of which says how it ended."""
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    top = [part.top_logprobs for part in logprobs if part.top_logprobs is not None]
    joined = TextLogprobs(
        tokens=[token for part in logprobs for token in part.tokens],
        token_logprobs=[value for part in logprobs for value in part.token_logprobs],
        top_logprobs=[at for part in top for at in part] if top else None,
        text_offset=[offset for part in logprobs for offset in part.text_offset],
    )
    text = "".join(part.text for part in parts)
    return parts[-1].model_copy(update={"text": text, "logprobs": joined if logprobs else None})


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

    def build_response(self) -> ChatResponse:
        """Builds the whole response."""
        choices = [
            ChatChoice(
                index=index,
                message=message,
                logprobs=self._build_logprobs(reply.tokens),
                finish_reason=_get_finish_reason(reply, message),
                **self._list_ids(reply),
            )
            for index, (reply, message) in enumerate(self.list_replies())
        ]
        head = _build_head(self.id, self.model)
        return ChatResponse(**head, choices=choices, usage=count_usage([self.group]))

    def iterate_chunks(self) -> Iterator[ChatChunk]:
        """Yields the chunks of a stream: the role, a text for each token that completes one, or
        the content and the calls of a message with calls, and the reason for its end."""
        head = _build_head(self.id, self.model)
        for index, (reply, message) in enumerate(self.list_replies()):
            for delta, tokens in _split_message(reply, message):
                logprobs = self._build_logprobs(tokens) if tokens else None
                choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs)
                yield ChatChunk(**head, choices=[choice])
            end = ChatChunkChoice(
                index=index,
                delta=MessageDelta(),
                finish_reason=_get_finish_reason(reply, message),
                **self._list_ids(reply),
            )
            yield ChatChunk(**head, choices=[end])
        if self.request.includes_usage:
            yield ChatChunk(**head, choices=[], usage=count_usage([self.group]))

    def list_replies(self) -> Iterator[tuple[Reply, ReplyMessage]]:
        """Yields what was sampled for each choice, and the message that it is."""
        for sampled in self.group:
            reply = self.model.read_completion(sampled, self.request.stop)
            yield reply, self.model.parse_message(reply, self.request.offered_tools)

    def _list_ids(self, reply: Reply) -> dict[str, Any]:
        if not self.request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(reply.prompt_ids), "token_ids": list(reply.token_ids)}

    def _build_logprobs(self, tokens: Sequence[ReplyToken]) -> ChatLogprobs | None:
        if self.request.likeliest is None:
            return None
        content = [
            ContentLogprob(
                **self._build_token(token.token_id, token.logprob or 0.0).model_dump(),
                top_logprobs=[self._build_token(*each) for each in token.likeliest],
            )
            for token in tokens
        ]
        return ChatLogprobs(content=content)

    def _build_token(self, token: int, logprob: float) -> TokenLogprob:
        content = self.model.get_bytes(token)
        return TokenLogprob(
            token=self.model.format_token(token),
            logprob=max(logprob, LEAST_LOGPROB),
            bytes=None if content is None else list(content),
        )


def _split_message(
    reply: Reply, message: ReplyMessage
) -> Iterator[tuple[MessageDelta, Sequence[ReplyToken]]]:
    """Yields what a stream adds to a message, with the tokens that it is."""
    yield MessageDelta(role="assistant", content=""), ()
    if message.content == reply.text:
        for text, tokens in reply.split_pieces():
            yield MessageDelta(content=text), tokens
        return
    calls = [
        CallDelta(index=number, **call.model_dump())
        for number, call in enumerate(message.tool_calls or ())
    ]
    yield (
        MessageDelta(
            content=message.content,
            reasoning_content=message.reasoning_content,
            tool_calls=calls or None,
        ),
        reply.tokens,
    )


def _get_finish_reason(reply: Reply, message: ReplyMessage) -> FinishReason:
    return "tool_calls" if message.tool_calls else reply.finish_reason


def _build_head(response: str, model: ServedModel) -> dict[str, Any]:
    return {"id": response, "created": int(time.time()), "model": model.name}
