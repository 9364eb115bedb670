"""Rollout trees: every segment is stored once, and a trajectory is a path from the root.

The prompt is the root, and answers are its children. Below an answer come its continuations: a
question and its confidences, or an observation and the next turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlx.errors import TreeError
from rlx.plugin import Problem

NO_PARENT = -1

Author = Literal["prompt", "policy", "environment"]


@dataclass(frozen=True, slots=True)
class Span:
    """A named range `<name>...</name>` of a turn: half-open ranges of its tokens with the tags and
    without, and the characters between them."""

    outer: tuple[int, int]
    inner: tuple[int, int]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens written by one author.

    Attributes:
        parent: index of the segment this one continues, or `NO_PARENT`.
        author: who wrote the tokens. Tokens that close one turn and open the next have "prompt".
        token_ids: a concatenated path is exactly what the model saw.
        turn: number of the turn in its trajectory, from 1; 0 for prompts.
        kind: kind of turn ("answer", "confidence", ...); "" for prompts.
        logprobs: nats of each token under the distribution that it was sampled from; empty for
            other authors than "policy".
        finish_reason: "stop" or "length" for policy segments, else "".
        text: the tokens decoded, without the token that ends the turn.
        spans: named spans found in the text.
        seed: sampling seed of this segment.
        info: the environment's report on the turn.
        hull: half-open range of tokens of `find_hull`.
    """

    parent: int
    author: Author
    token_ids: tuple[int, ...]
    turn: int = 0
    kind: str = ""
    logprobs: tuple[float, ...] = ()
    finish_reason: Literal["", "stop", "length"] = ""
    text: str = ""
    spans: Mapping[str, Span] = field(default_factory=dict)
    seed: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)
    hull: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        expected = len(self.token_ids) if self.author == "policy" else 0
        if len(self.logprobs) != expected:
            raise TreeError(
                f"a segment of {len(self.token_ids)} {self.author} tokens "
                f"needs {expected} logprobs, got {len(self.logprobs)}"
            )
        if self.author == "policy" and (self.turn < 1 or not self.kind):
            raise TreeError("a policy segment needs a turn number from 1 and a kind")
        if self.author == "policy" and not self.token_ids:
            raise TreeError("a policy segment needs at least one token")


@dataclass(frozen=True)
class RolloutTree:
    """All rollouts of one prompt; every segment comes after its parent."""

    problem: Problem
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        for index, segment in enumerate(self.segments):
            if not NO_PARENT <= segment.parent < index:
                raise TreeError(
                    f"segment {index} of {self.problem.id!r} names parent {segment.parent}; "
                    "parents come before their children"
                )

    def path(self, segment: int) -> tuple[int, ...]:
        reversed_path = []
        while segment != NO_PARENT:
            reversed_path.append(segment)
            segment = self.segments[segment].parent
        return tuple(reversed(reversed_path))

    def turns(self, segment: int) -> tuple[int, ...]:
        return tuple(i for i in self.path(segment) if self.segments[i].author == "policy")

    def token_ids(self, segment: int) -> tuple[int, ...]:
        return tuple(t for i in self.path(segment) for t in self.segments[i].token_ids)

    def count_tokens(self, segment: int) -> int:
        return sum(len(self.segments[i].token_ids) for i in self.path(segment))

    def own_turns(self, segment: int) -> tuple[tuple[int, ...], int]:
        """The policy segments of the trajectory that ends with a turn, between which only
        observations lie, and the policy segment that it continues through a prompt, or `NO_PARENT`.
        """
        own = []
        while segment != NO_PARENT and self.segments[segment].author != "prompt":
            if self.segments[segment].author == "policy":
                own.append(segment)
            segment = self.segments[segment].parent
        while segment != NO_PARENT and self.segments[segment].author != "policy":
            segment = self.segments[segment].parent
        return tuple(reversed(own)), segment

    @property
    def rollouts(self) -> tuple[int, ...]:
        """Last turns of the trajectories that continue the root, in tree order."""
        ending = {index: self.own_turns(index) for index in self.policy_segments}
        continued = {turn for own, _ in ending.values() for turn in own[:-1]}
        return tuple(
            index
            for index, (_, parent) in ending.items()
            if parent == NO_PARENT and index not in continued
        )

    @property
    def policy_segments(self) -> tuple[int, ...]:
        return tuple(i for i, s in enumerate(self.segments) if s.author == "policy")


def find_spans(
    text: str, ends: Sequence[int], names: Sequence[str], *, first_turn: bool = True
) -> Mapping[str, Span]:
    """Finds the last `<name>...</name>` of each name, from the last tag that opens it.

    Rewards read answers by their sources' regular expression instead: `rlx.plugin.find_last_block`.

    Args:
        text: decoded text of the turn's tokens.
        ends: for every token, the number of characters decoded up to and including it. A character
            belongs to the token that completes it, and a token that crosses a boundary to the span.
        names: tags to find.
        first_turn: `</think>` without `<think>` counts from the start of the turn, since prompts
            may already open the tag; so may the headers of later messages.
    """
    found: dict[str, Span] = {}
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        close = text.rfind(closing)
        if close < 0:
            continue
        begin = text.rfind(opening, 0, close)
        if begin < 0:
            if not (first_turn and name == "think"):
                continue
            begin, inside = 0, 0
        else:
            inside = begin + len(opening)
        found[name] = Span(
            outer=_find_token_range(ends, begin, close + len(closing)),
            inner=_find_token_range(ends, inside, close),
            text=text[inside:close],
        )
    return found


def find_hull(
    text: str, ends: Sequence[int], names: Sequence[str], *, first_turn: bool = True
) -> tuple[int, int] | None:
    """Finds what reaches from the first of several spans to the last, words between them included.

    It begins with the first tag that is opened, in the order of `names`. It ends where the last
    span is closed, or with the turn if that is missing. Arguments are those of `find_spans`.

    Reference:
        RLCR in two turns (RLCR: arXiv 2507.16806): from think to the end of the answer, from the
        analysis, if there is one, to the end of the confidence.
    """
    openings = (_find_opening(text, name, first_turn) for name in names)
    begin = next((at for at in openings if at is not None), None)
    if begin is None:
        return None
    closing = f"</{names[-1]}>"
    close = text.rfind(closing, begin)
    if close < 0:
        return _find_token_range(ends, begin, len(text))[0], len(ends)
    return _find_token_range(ends, begin, close + len(closing))


def _find_opening(text: str, name: str, first_turn: bool) -> int | None:
    """Where `<name>` stands for the first time; the start of a turn that only closes `think`."""
    opening = text.find(f"<{name}>")
    if opening >= 0:
        return opening
    return 0 if first_turn and name == "think" and "</think>" in text else None


def _find_token_range(ends: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Half-open range of the tokens that contain any part of `text[start:stop]`.

    Bytes of an incomplete character do not advance the text and belong to what follows them.
    """
    if start >= stop:
        at = sum(1 for end in ends if end <= start)
        return at, at
    reached = next((i for i, end in enumerate(ends) if end >= start), len(ends) - 1)
    first = reached + 1 if start and ends[reached] == start else reached
    last = next((i for i, end in enumerate(ends) if end >= stop), len(ends) - 1)
    return first, last + 1
