"""Records the rollouts of programs that ask the policy for their turns.

A request's context continues a turn, whose recorded tokens it begins with, or opens a dialogue.
Where a turn has one continuation, this is an observation and its row goes on. Where a program forks
its own history, the turn ends its row, and each continuation begins a row below it, so that every
turn is learned once.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.plugin import FAILED, Problem
from rlx.rollout.conversations import (
    EnvironmentPlan,
    build_fault_segment,
    derive_turn_seed,
)
from rlx.rollout.dialogue import (
    Completion,
    Dialogue,
    TurnPrompt,
    build_turn_segment,
    find_shared_beginning,
)
from rlx.rollout.hosts import HostFault
from rlx.rollout.tree import NO_PARENT, Author, RolloutTree, Segment
from rlx.seeding import derive_seed

KIND = "turn"
"""Kind of the turns of an agent."""


class RolloutOverError(Exception):
    pass


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """A turn that a program was given.

    Attributes:
        segment: the turn; its parent is known once the tree is built.
        whole: all tokens up to its end.
        is_main: whether it belongs to the dialogue that opens as the experiment shows the problem,
            and that is never sampled again.
        order: number of the sampling call, and of its completion in it.
        contexts: what continues it.
    """

    segment: Segment
    whole: tuple[int, ...]
    is_main: bool
    order: tuple[int, int]
    contexts: list["RecordedContext"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RecordedContext:
    """What a program has the model read before turns.

    Attributes:
        turn: the turn that it continues; None if it opens a dialogue.
        prompt: its tokens after that turn.
        whole: all tokens.
        turns: by their number, from 0.
        taken: numbers of the turns that are sampled now.
    """

    turn: RecordedTurn | None
    prompt: TurnPrompt
    whole: tuple[int, ...]
    is_main: bool
    turns: dict[int, RecordedTurn] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)

    @property
    def number(self) -> int:
        return 1 if self.turn is None else self.turn.segment.turn + 1


@dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
    """Turns to be sampled after a context, each with its number below it and its seed; `is_last`
    says that the rollout has none after these."""

    context: RecordedContext
    numbers: tuple[int, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int
    is_last: bool


@dataclass(slots=True, eq=False)
class RolloutRecorder:
    """Records one rollout of one problem. Nothing depends on the order in which requests arrive.

    Attributes:
        opening: what the experiment shows of the problem before the first turn.
        seed: seed of the problem.
        place: number of the rollout among those of the problem.
        openings: contexts that open a dialogue.
        turns: all turns, in the order in which they were sampled.
        ending: what the program wanted to go on with when the rollout was over.
        info: what the program reported on the whole rollout.
        fault: why the rollout is lost; None if it is not.
    """

    plan: EnvironmentPlan
    opening: TurnPrompt
    seed: int
    place: int
    context_length: int
    openings: list[RecordedContext] = field(default_factory=list)
    turns: list[RecordedTurn] = field(default_factory=list)
    ending: RecordedContext | None = None
    info: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None
    _asked: int = 0

    def ask(
        self,
        after: RecordedTurn | None,
        prompt: TurnPrompt,
        *,
        count: int = 1,
        max_new_tokens: int | None = None,
    ) -> TurnRequest:
        """Returns what is to be sampled after `prompt`, which continues the turn `after` or opens a
        dialogue; `record` or `withdraw` must follow.

        Raises:
            RolloutOverError: the rollout has had its turns, or the next does not fit.
        """
        context = self._find_context(after, prompt)
        limit = self.plan.turn.max_new_tokens
        limit = limit if max_new_tokens is None else min(limit, max_new_tokens)
        begun = len(self.turns) + self._asked
        if begun + count > self.plan.max_turns:
            self._end(context)
            raise RolloutOverError(f"the rollout has had its {self.plan.max_turns} turns")
        if len(context.whole) + limit > self.context_length:
            if not self.turns:
                self.fault = f"its first request of {len(context.whole)} tokens leaves no room"
            self._end(context)
            raise RolloutOverError(
                f"the model's maximum context length is {self.context_length} tokens, but the "
                f"dialogue has {len(context.whole)} and the turn may have {limit}"
            )
        if context not in self._siblings(context):
            self._siblings(context).append(context)
        free = (n for n in range(self.plan.max_turns) if n not in {*context.turns, *context.taken})
        numbers = tuple(next(free) for _ in range(count))
        context.taken |= {*numbers}
        self._asked += count
        seeds = tuple(self._derive_seed(context, number) for number in numbers)
        return TurnRequest(context, numbers, seeds, limit, begun + count == self.plan.max_turns)

    def withdraw(self, request: TurnRequest) -> None:
        self._asked -= len(request.numbers)
        request.context.taken -= {*request.numbers}
        if not request.context.turns and not request.context.taken:
            self._siblings(request.context).remove(request.context)

    def record(
        self,
        request: TurnRequest,
        completions: Sequence[Completion],
        dialogue: Dialogue,
        first: tuple[int, int],
    ) -> list[RecordedTurn]:
        """Records the turns of a request; `first` is the number of the sampling call, and of the
        first completion in it."""
        context = request.context
        made: list[RecordedTurn] = []
        self._asked -= len(request.numbers)
        context.taken -= {*request.numbers}
        for number, seed, completion in zip(
            request.numbers, request.seeds, completions, strict=True
        ):
            segment = build_turn_segment(
                completion,
                dialogue,
                self.plan.turn,
                parent=NO_PARENT,
                number=context.number,
                kind=KIND,
                seed=seed,
            )
            turn = RecordedTurn(
                segment,
                context.whole + completion.token_ids,
                context.is_main and number == 0,
                (first[0], first[1] + len(made)),
            )
            context.turns[number] = turn
            made.append(turn)
        self.turns += made
        return made

    def forget(self, request: TurnRequest) -> None:
        """Forgets turns that nobody was given; the next request for them gets the same ones."""
        gone = [request.context.turns.pop(number) for number in request.numbers]
        self.turns = [turn for turn in self.turns if turn not in gone]
        self._asked += len(gone)
        self.withdraw(request)

    def find_repeated(
        self, after: RecordedTurn | None, prompt: TurnPrompt, count: int
    ) -> list[RecordedTurn] | None:
        """The last turns after a context that nothing continues: a client asks for them again."""
        found = list(self._find_context(after, prompt).turns.values())[-count:]
        unread = len(found) == count and not any(turn.contexts for turn in found)
        return found if unread else None

    def report(self, turns: Sequence[RecordedTurn] | None, info: Mapping[str, Any]) -> None:
        """Adds to the `info` of turns, or of the whole rollout."""
        if turns is None:
            self.info |= info
        for turn in turns or ():
            turn.segment = replace(turn.segment, info={**turn.segment.info, **info})

    def _find_context(self, after: RecordedTurn | None, prompt: TurnPrompt) -> RecordedContext:
        whole = (() if after is None else after.whole) + prompt.token_ids
        for context in self.openings if after is None else after.contexts:
            if context.whole == whole:
                return context
        is_main = whole == self.opening.token_ids if after is None else after.is_main
        return RecordedContext(after, prompt, whole, is_main)

    def _siblings(self, context: RecordedContext) -> list[RecordedContext]:
        return self.openings if context.turn is None else context.turn.contexts

    def _end(self, context: RecordedContext) -> None:
        """Notes what the program wanted to go on with, if that is an observation of a turn."""
        turn = context.turn
        if turn is not None and not turn.contexts and self.ending is None:
            self.ending = context

    def _derive_seed(self, context: RecordedContext, number: int) -> int:
        """In the main dialogue that of a rollout with an environment; elsewhere by the tokens
        before."""
        if context.is_main and number == 0:
            return derive_turn_seed(self.seed, self.place, context.number)
        words = repr(context.whole).encode()
        digest = hashlib.blake2b(words, digest_size=16).hexdigest()
        return derive_seed(self.seed, "turn", self.place, context.number, digest, number)


def build_agent_tree(problem: Problem, rollouts: Sequence[RolloutRecorder]) -> RolloutTree:
    """The tree of a problem; its root has what all dialogues begin with."""
    openings = [context.prompt for one in rollouts for context in one.openings]
    openings = openings or [rollouts[0].opening]
    root = find_shared_beginning(openings)
    builder = _TreeBuilder(root, [root.to_segment("prompt")])
    for rollout in rollouts:
        builder.add_rollout(rollout)
    return RolloutTree(problem, tuple(builder.segments))


@dataclass(slots=True)
class _TreeBuilder:
    root: TurnPrompt
    segments: list[Segment]

    def add_rollout(self, rollout: RolloutRecorder) -> None:
        if not rollout.openings and rollout.fault is not None:
            self._add_fault(0, rollout)
        for context in _sort_contexts(rollout.openings):
            rest = context.prompt.cut_beginning(self.root)
            parent = self._add(0, rest.to_segment("environment")) if rest.token_ids else 0
            self._add_turns(parent, context, rollout)

    def _add_turns(self, parent: int, context: RecordedContext, rollout: RolloutRecorder) -> None:
        for _, turn in sorted(context.turns.items()):
            segment = turn.segment
            if not turn.contexts:
                kind = FAILED if rollout.fault is not None else segment.kind
                segment = replace(segment, kind=kind, info={**segment.info, **rollout.info})
            at = self._add(parent, segment)
            forks = sum(len(each.turns) for each in turn.contexts) > 1
            if forks:
                joined = {**segment.info, **rollout.info}
                self.segments[at] = replace(self.segments[at], info=joined)
            for each in _sort_contexts(turn.contexts):
                author: Author = "prompt" if forks else "environment"
                below = self._add(at, each.prompt.to_segment(author))
                self._add_turns(below, each, rollout)
            if (ending := rollout.ending) and ending.turn is turn and not turn.contexts:
                at = self._add(at, ending.prompt.to_segment("environment"))
            if not turn.contexts and rollout.fault is not None:
                self._add_fault(at, rollout)

    def _add(self, parent: int, segment: Segment) -> int:
        self.segments.append(replace(segment, parent=parent))
        return len(self.segments) - 1

    def _add_fault(self, parent: int, rollout: RolloutRecorder) -> None:
        fault = HostFault(rollout.fault or "")
        self._add(parent, build_fault_segment(fault, rollout.plan))


def _sort_contexts(contexts: Sequence[RecordedContext]) -> list[RecordedContext]:
    """The main one first, then by their tokens; without those that have no turns."""
    kept = [context for context in contexts if context.turns]
    return sorted(kept, key=lambda context: (not context.is_main, context.whole))
