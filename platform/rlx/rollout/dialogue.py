"""The interface between a model's dialogue format and the rollouts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, Protocol

from rlx.errors import SpecError
from rlx.plugin import Message, Problem, ToolCall
from rlx.rollout.tools import ReadReply, Schema
from rlx.rollout.tree import NO_PARENT, Author, Segment, find_hull, find_spans
from rlx.spec import RolloutSpec, TurnSpec

Pieces = Callable[[Sequence[int]], Sequence[str]]
"""Returns the text of each token of a sequence."""


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """What a model reads before a turn: the text that is shown, and all tokens since the turn
    before."""

    text: str
    token_ids: tuple[int, ...]

    def to_segment(
        self, author: Author, parent: int = NO_PARENT, anchor: str | None = None
    ) -> Segment:
        """The segment of these tokens; `anchor` names the state in which the next turn begins."""
        info = {} if anchor is None else {"state": anchor}
        ids = self.token_ids
        return Segment(parent=parent, author=author, token_ids=ids, text=self.text, info=info)

    def cut_beginning(self, other: "TurnPrompt") -> "TurnPrompt":
        """What follows another prompt, with which this one begins."""
        return TurnPrompt(self.text[len(other.text) :], self.token_ids[len(other.token_ids) :])


def count_shared(sequences: Sequence[Sequence[Any]]) -> int:
    """Length of the longest common prefix."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda column: all(x == column[0] for x in column), columns))


def find_shared_beginning(prompts: Sequence[TurnPrompt]) -> TurnPrompt:
    """What all prompts begin with."""
    first = next(iter(prompts), TurnPrompt("", ()))
    text = first.text[: count_shared([prompt.text for prompt in prompts])]
    shared = count_shared([prompt.token_ids for prompt in prompts])
    return TurnPrompt(text, first.token_ids[:shared])


class Dialogue(Protocol):
    """Converts text to tokens and back in the model's format. Never re-tokenises sampled tokens."""

    def open(
        self,
        text: str,
        system: str = "",
        history: Sequence[Message] = (),
        prefix: str = "",
        tools: Sequence[Schema] = (),
    ) -> tuple[int, ...]:
        """Tokens of an optional system message, tools, earlier messages and `text`, up to the start
        of the first turn, which begins with `prefix`."""
        ...

    def reply(self, text: str, after: Sequence[int], prefix: str = "") -> tuple[int, ...]:
        """Tokens that close the turn `after` if it did not do so itself, contain `text`, and start
        the next turn."""
        ...

    def encode(self, text: str) -> tuple[int, ...]: ...

    def read(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Text of a turn without its end token, and the text's length after every token."""
        ...

    def piece(self, token: int) -> str: ...

    def break_control_tokens(self, text: str) -> str:
        """Inserts a space into the name of every control token, for text that is not trusted."""
        ...

    def encode_observation(
        self, text: str, after: Sequence[int], *, inline: bool, prefix: str = ""
    ) -> TurnPrompt:
        """Encodes an environment's text after the turn `after`: directly (`inline`), or like
        `reply`."""
        ...

    def encode_results(
        self,
        results: Sequence[tuple[ToolCall, str]],
        text: str,
        after: Sequence[int],
        tools: Sequence[Schema],
        prefix: str = "",
    ) -> TurnPrompt:
        """Encodes what the calls in the turn `after` gave, as messages of the role `tool`, and then
        a `text` of the user if there is one."""
        ...

    def read_reply(self, text: str, context: Sequence[int], tools: Sequence[Schema]) -> ReadReply:
        """Reads the calls of tools in a turn after the tokens `context`."""
        ...

    def write_call(self, call: ToolCall) -> str:
        """Writes a call as the model is to write it.

        Raises:
            SpecError: the model's chat template does not write calls.
        """
        ...


def encode_between_turns(
    dialogue: Dialogue, text: str, after: Sequence[int], prefix: str = ""
) -> tuple[int, ...]:
    """Tokens between the turn `after` and a turn with the prompt `text` that begins with `prefix`.
    Without a text the next turn continues the same message."""
    return dialogue.reply(text, after, prefix) if text else dialogue.encode(prefix)


def fill_turn_template(dialogue: Dialogue, template: str, problem: Problem) -> str:
    """Puts the problem's prompt into a template; names of control tokens in the prompt are broken
    up, unless the problem allows them."""
    prompt = problem.prompt
    if not problem.allow_control_tokens:
        prompt = dialogue.break_control_tokens(prompt)
    return template.replace("{prompt}", prompt)


def list_example_messages(rollout: RolloutSpec) -> tuple[Message, ...]:
    return tuple(message for example in rollout.examples for message in example.messages)


def encode_opening(
    dialogue: Dialogue,
    template: str,
    problem: Problem,
    system: str = "",
    examples: Sequence[Message] = (),
    prefix: str = "",
    tools: Sequence[Schema] = (),
) -> TurnPrompt:
    """Encodes what the model reads before the first turn; `system` is for a problem without its
    own, and `examples` come before the messages of the problem."""
    own, history = problem.system, problem.history
    if not problem.allow_control_tokens:
        own = dialogue.break_control_tokens(own)
        history = tuple(
            replace(message, content=dialogue.break_control_tokens(message.content))
            for message in history
        )
    text, messages = fill_turn_template(dialogue, template, problem), (*examples, *history)
    return TurnPrompt(text, dialogue.open(text, own or system, messages, prefix, tools))


def read_turn(
    dialogue: Dialogue, token_ids: Sequence[int], prefix: str
) -> tuple[str, tuple[int, ...]]:
    """The text of a turn that begins with `prefix`, whose characters count to its first token, and
    its length after every token."""
    text, ends = dialogue.read(token_ids)
    return prefix + text, tuple(len(prefix) + end for end in ends)


_OPENED = 16
"""Tokens before a turn in which the tag stands that it may close."""


def may_close_think(dialogue: Dialogue, number: int, context: Sequence[int]) -> bool:
    """Whether `</think>` alone ends a span that begins with the turn: in the first turn, whose
    prompt may open the tag, and where the template begins a message with `<think>`."""
    if number == 1:
        return True
    text, _ = dialogue.read(context[-_OPENED:])
    return text.rstrip().endswith("<think>")


def build_piece_splitter(speech: Dialogue | None) -> Pieces:
    """Builds a function from tokens to their texts; without a dialogue, to their ids.

    A character belongs to the token that completes it. A token that adds no text is decoded alone.
    """
    if speech is None:
        return lambda ids: [f"#{token}" for token in ids]

    def split_pieces(ids: Sequence[int]) -> list[str]:
        text, ends = speech.read(ids)
        parts = [text[a:b] for a, b in zip((0, *ends), ends, strict=False)]
        return [part or speech.piece(token) for part, token in zip(parts, ids, strict=True)]

    return split_pieces


def remove_prefix(text: str, prefix: str) -> str:
    """What is left to write of a worked turn that begins with `prefix`.

    Raises:
        SpecError: the turn does not begin with it.
    """
    if not text.startswith(prefix):
        raise SpecError(
            f"a worked turn begins with {text[: len(prefix) + 20]!r}, not with the prefix "
            f"{prefix!r} of its kind: begin it so, or leave the prefix out"
        )
    return text[len(prefix) :]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for continuations of one context.

    Attributes:
        extends: index of the completion that `context` continues, over all requests of the
            session's previous `generate`, so that an engine may use its cache; None for a new
            context.
        seeds: one per continuation.
        is_last: no later request extends the continuations.
        max_new_tokens: limit of each continuation, if it is below that of the sampling settings.
        is_abandoned: says that nobody waits for the continuations any more; called from the thread
            that samples.
    """

    context: tuple[int, ...]
    extends: int | None
    seeds: tuple[int, ...]
    is_last: bool = False
    max_new_tokens: int | None = None
    is_abandoned: Callable[[], bool] | None = None

    def limit_tokens(self, sampling: TurnSpec) -> int:
        most = sampling.max_new_tokens
        return most if self.max_new_tokens is None else min(most, self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation, with log-probabilities in nats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]


def build_turn_segment(
    completion: Completion,
    dialogue: Dialogue,
    turn: TurnSpec,
    *,
    parent: int,
    number: int,
    kind: str,
    seed: int,
    context: Sequence[int] = (),
) -> Segment:
    """Builds the segment of a sampled turn, with its text and its spans."""
    first = may_close_think(dialogue, number, context)
    text, ends = read_turn(dialogue, completion.token_ids, turn.prefix)
    return Segment(
        parent=parent,
        author="policy",
        token_ids=completion.token_ids,
        turn=number,
        kind=kind,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        text=text,
        spans=find_spans(text, ends, turn.spans, first_turn=first),
        hull=find_hull(text, ends, turn.spans, first_turn=first),
        seed=seed,
    )


class SamplingSession(Protocol):
    """One batch of trees being sampled; engines keep their caches while it is open."""

    @property
    def context_length(self) -> int: ...

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """One completion per seed of each request, in order."""
        ...


class Sampler(Protocol):
    """A sampling engine."""

    def session(self) -> AbstractContextManager[SamplingSession]:
        """Opens a session. Weights do not change while it is open, unless completions say which
        sampled them."""
        ...
