"""Requests as tokens, and samples as texts and messages. Nothing here knows HTTP or an engine."""

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from rlx.errors import SpecError
from rlx.model import ModelDialogue, PlainDialogue, TokenBytes
from rlx.rollout import CompletionRequest
from rlx.seeding import derive_seed
from rlx.serving.batcher import SampledCompletion, SamplingJob
from rlx.serving.protocol import ChatMessage, ChatRequest, SamplingRequest, TextRequest
from rlx.spec import TurnSpec

LEAST_LOGPROB = -9999.0
"""What is reported instead of -∞, which JSON has not."""


class InvalidRequestError(Exception):
    """A request is refused with this status; `param` is the field at fault, `code` is OpenAI's."""

    def __init__(
        self, message: str, param: str | None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@contextmanager
def refuse_for(param: str) -> Iterator[None]:
    """Refuses a request for a field that the model cannot read."""
    try:
        yield
    except SpecError as error:
        raise InvalidRequestError(str(error), param) from error


@dataclass(frozen=True, slots=True)
class ReplyToken:
    """A token of a text, which begins after `start` characters, with its log-probability in nats
    and the likeliest tokens at its place, if asked for."""

    token_id: int
    start: int
    logprob: float | None
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """What was sampled, as text that ends before a stop string.

    Attributes:
        tokens: those of the text, and an end token; those of a stop string are left out.
        token_ids: all that were sampled.
        prompt_ids: all that they continue.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    tokens: tuple[ReplyToken, ...]
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The prompt of a completion as it is repeated, its tokens, and the characters before each."""

    text: str
    token_ids: tuple[int, ...]
    starts: tuple[int, ...]


class ServedPolicy(Protocol):
    """What a served model needs of a policy, such as `rlx.model.Policy`; `vocabulary` is the number
    of tokens that the model has."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def dialogue(self) -> ModelDialogue: ...

    @property
    def end_ids(self) -> tuple[int, ...]: ...

    @property
    def vocabulary(self) -> int: ...


@dataclass(frozen=True)
class ServedModel:
    """A model as requests see it.

    Attributes:
        context_length: the engine's maximum length of a dialogue, in tokens.
        aliases: other names in requests.
        min_temperature: lowest temperature of the engine; 0 is always the likeliest tokens.
        max_tokens: maximum length of a message whose request does not say it, in tokens.
    """

    name: str
    policy: ServedPolicy
    context_length: int
    aliases: frozenset[str] = frozenset()
    min_temperature: float = 0.0
    max_tokens: int = 1024

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self.policy.tokenizer)

    def encode_prompt(self, prompt: str | list[int]) -> TokenizedPrompt:
        if isinstance(prompt, str):
            with refuse_for("prompt"):
                plain = PlainDialogue(self.policy.tokenizer, self.policy.end_ids)
                ids, begin = plain.open_text(prompt)
        else:
            ids, begin = self.require_tokens(prompt), 0
        if not ids:
            raise InvalidRequestError("the prompt has no tokens", "prompt")
        text, ends = self.policy.dialogue.read(ids[begin:])
        starts = (*[0] * begin, *_list_starts(ends))
        return TokenizedPrompt(prompt if isinstance(prompt, str) else text, ids, starts)

    def require_tokens(self, ids: Sequence[int]) -> tuple[int, ...]:
        if (unknown := max(ids, default=0)) >= self.policy.vocabulary:
            raise InvalidRequestError(f"the model has no token {unknown}", "prompt")
        return tuple(ids)

    def encode_messages(self, request: ChatRequest) -> tuple[int, ...]:
        """Writes messages and tools as the model reads them, up to the start of its own message."""
        messages = self.write_messages(request.messages)
        with refuse_for("messages"):
            return self.policy.dialogue.open_chat(messages, request.offered_tools)

    def encode_following(
        self,
        messages: Sequence[ChatMessage],
        after: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[int, ...]:
        """Writes messages that follow the turn `after`, up to the model's next turn."""
        with refuse_for("messages"):
            return self.policy.dialogue.follow_chat(self.write_messages(messages), after, tools)

    def write_messages(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Messages as chat templates read them; names of control tokens in what users and tools say
        are broken up, as in rollouts."""
        written = [message.to_template() for message in messages]
        for message in written:
            if message["role"] in ("user", "tool"):
                content = self.policy.dialogue.break_control_tokens(message["content"])
                message["content"] = content
        return written

    def build_job(
        self, request: TextRequest | ChatRequest, contexts: Sequence[tuple[int, ...]]
    ) -> SamplingJob:
        name, asked = request.token_limit
        limits = []
        for context in contexts:
            room = self.context_length - len(context)
            limit = min(self.max_tokens, max(1, room)) if asked is None else asked
            if limit > room:
                raise InvalidRequestError(
                    f"this model's maximum context length is {self.context_length} tokens, but "
                    f"the prompt has {len(context)} and the completion may have {limit}",
                    "messages" if asked is None else name,
                )
            limits.append(limit)
        base = secrets.randbits(63) if request.seed is None else request.seed
        numbers = iter(range(len(contexts) * request.choices))
        requests = tuple(
            CompletionRequest(
                context,
                None,
                tuple(derive_seed(base, "choice", next(numbers)) for _ in range(request.choices)),
                is_last=True,
                max_new_tokens=limit,
            )
            for context, limit in zip(contexts, limits, strict=True)
        )
        sampling = self._build_sampling(request, max(1, *limits))
        return SamplingJob(requests, sampling, request.likeliest)

    def _build_sampling(self, request: SamplingRequest, limit: int) -> TurnSpec:
        temperature = 1.0 if request.temperature is None else request.temperature
        if 0 < temperature < self.min_temperature:
            raise InvalidRequestError(
                f"the lowest temperature above 0 is {self.min_temperature:g}", "temperature"
            )
        if temperature == 0:
            return TurnSpec(max_new_tokens=limit, top_k=1, stop=request.stop)
        return TurnSpec(
            max_new_tokens=limit,
            temperature=temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(0, request.top_k or 0),
            stop=request.stop,
        )

    def read_completion(self, sampled: SampledCompletion, stop: Sequence[str]) -> Reply:
        """Reads what was sampled, up to the first of its stop strings."""
        ids = sampled.completion.token_ids
        text, ends = self.policy.dialogue.read(ids)
        cut = min((at for string in stop if (at := text.find(string)) >= 0), default=None)
        starts = _list_starts(ends)
        count = len(ids) if cut is None else sum(start < cut for start in starts)
        tokens = self.list_tokens(sampled, len(sampled.context), starts[:count])
        return Reply(text[:cut], sampled.completion.finish_reason, tokens, ids, sampled.context)

    def list_tokens(
        self, sampled: SampledCompletion, first: int, starts: Sequence[int]
    ) -> tuple[ReplyToken, ...]:
        """Tokens of a context and its completion, from number `first`, with their places."""
        ids = sampled.context + sampled.completion.token_ids
        logprobs: Mapping[int, float] = {}
        likeliest: Mapping[int, tuple[tuple[int, float], ...]] = {}
        if sampled.logprobs is not None:
            logprobs = dict(enumerate(sampled.logprobs.logprobs, start=1))
            likeliest = dict(enumerate(sampled.logprobs.likeliest, start=1))
        return tuple(
            ReplyToken(ids[at], start, _limit(logprobs.get(at)), likeliest.get(at, ()))
            for at, start in enumerate(starts, start=first)
        )

    def get_bytes(self, token: int) -> bytes | None:
        """The bytes of a token; None for a control token, and for one that ends a message."""
        return None if token in self.policy.end_ids else self._bytes(token)

    def format_token(self, token: int) -> str:
        """A token's text, bytes that are part of a character, or a control token's name."""
        content = self.get_bytes(token)
        if content is None:
            return self.policy.dialogue.piece(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def parse_message(self, reply: Reply, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The message of a reply in OpenAI's form, with its calls if the model was shown tools;
        what cannot be read as a call stays in the content. Equal calls in equal dialogues have
        equal ids."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
        if not tools:
            return message
        read = self.policy.dialogue.read_reply(reply.text, reply.prompt_ids, tools)
        whole = repr((reply.prompt_ids, reply.token_ids)).encode()
        dialogue = hashlib.blake2b(whole, digest_size=10).hexdigest()
        calls = [
            {
                "id": f"call_{dialogue}{number:04x}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(call for call in read.calls if not call.fault)
        ]
        message["content"] = (read.content.strip() or None) if calls else read.content
        if read.reasoning is not None:
            message["reasoning_content"] = read.reasoning
        return {**message, "tool_calls": calls} if calls else message


def _list_starts(ends: Sequence[int]) -> list[int]:
    return [0, *ends][: len(ends)]


def _limit(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
