"""Schedules as levels, and the sampling of rollout trees: level k samples `count` continuations of
every turn of level k - 1."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Protocol, runtime_checkable

from rlx.discovery import import_implementation
from rlx.errors import PluginError, RlxError
from rlx.plugin import Message, Problem, Schedule, TurnLevel, find_answer_level
from rlx.rollout.conversations import (
    EnvironmentPlan,
    build_talk,
    sample_conversations,
)
from rlx.rollout.dialogue import (
    CompletionRequest,
    Dialogue,
    SamplingSession,
    TurnPrompt,
    build_turn_segment,
    encode_between_turns,
    encode_opening,
    fill_turn_template,
    list_example_messages,
)
from rlx.rollout.hosts import EnvironmentHost
from rlx.rollout.tree import NO_PARENT, RolloutTree, Segment
from rlx.seeding import derive_seed
from rlx.spec import AgentRolloutSpec, EnvironmentRolloutSpec, RolloutSpec


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What to sample for every problem.

    Attributes:
        levels: levels, first turn first.
        system: system message for problems without their own.
        talk: how the single level continues with an environment or an agent's program, if any.
        own: settings of a schedule whose own function samples the trees.
        examples: messages before those of every problem.
    """

    levels: tuple[TurnLevel, ...]
    system: str = ""
    talk: EnvironmentPlan | None = None
    own: Schedule | None = None
    agent: AgentRolloutSpec | None = None
    examples: tuple[Message, ...] = ()

    @property
    def answer_level(self) -> int:
        """Number, from 0, of the level whose turns answer the problem."""
        return find_answer_level([level.kind for level in self.levels])

    def list_answers(self, tree: RolloutTree) -> list[int]:
        """The turns of a tree that answer the problem; with an environment its first turns."""
        if self.talk is not None:
            return [s for s in tree.policy_segments if tree.segments[s].turn == 1]
        kind = self.levels[self.answer_level].kind
        return [s for s in tree.policy_segments if tree.segments[s].kind == kind]

    def copy_with_sampling(self, count: int, **sampling: int) -> "RolloutPlan":
        """A copy with `count` answers, or rollouts, per prompt and other options of their
        `TurnSpec`.

        If answers are not the first turns, there are `count` first turns, and one turn below each
        up to the answer. In self-play, the environment plays the second player of the copy.
        """
        talk, last = self.talk, self.answer_level
        if talk is not None:
            turn = talk.turn.model_copy(update=sampling)
            talk = replace(talk, count=count, turn=turn, players=1)
        levels = [
            replace(
                level,
                count=count if number == 0 else 1,
                turn=level.turn.model_copy(update=sampling),
            )
            for number, level in enumerate(self.levels[: last + 1])
        ]
        return replace(self, talk=talk)._replace_levels((*levels, *self.levels[last + 1 :]))

    @property
    def trees_per_prompt(self) -> int:
        return 1 if self.talk is None else self.talk.players

    @property
    def rows_per_prompt(self) -> int:
        """Maximum number of turns, or rollouts with an environment, of one problem."""
        rows: Iterator[int] = accumulate((level.count for level in self.levels), mul)
        return sum(rows) * self.trees_per_prompt

    @property
    def most_turns(self) -> int:
        return self.rows_per_prompt * (1 if self.talk is None else self.talk.last)

    @property
    def continued_per_prompt(self) -> int:
        """Maximum number of dialogues of one problem whose caches are kept after a turn."""
        if self.talk is not None:
            return self.talk.count if self.talk.players == 1 and self.talk.last > 1 else 0
        return prod(level.count for level in self.levels[:-1]) if len(self.levels) > 1 else 0

    def copy_with_siblings(self, most: int) -> "RolloutPlan":
        """A copy with at most so many turns below every turn; 1 leaves one rollout."""
        talk = self.talk
        if talk is not None:
            talk = replace(talk, count=min(most, talk.count))
        return replace(self, talk=talk)._replace_levels(
            tuple(replace(level, count=min(most, level.count)) for level in self.levels)
        )

    def _replace_levels(self, levels: tuple[TurnLevel, ...]) -> "RolloutPlan":
        own = None if self.own is None else self.own.copy_with_levels(levels)
        return replace(self, levels=levels, own=own)


def build_rollout_plan(spec: RolloutSpec, *, replayable: bool = True) -> RolloutPlan:
    talk = (
        build_talk(spec, replayable=replayable)
        if isinstance(spec, AgentRolloutSpec | EnvironmentRolloutSpec)
        else None
    )
    return RolloutPlan(
        spec.list_levels(),
        spec.system,
        talk,
        own=spec if spec.implementation else None,
        agent=spec if isinstance(spec, AgentRolloutSpec) else None,
        examples=list_example_messages(spec),
    )


@runtime_checkable
class AgentHost(Protocol):
    """Runs the programs of agents, which ask for the turns of their rollouts."""

    def sample_trees(
        self,
        plan: EnvironmentPlan,
        problems: Sequence[Problem],
        seeds: Sequence[int],
        session: SamplingSession,
        dialogue: Dialogue,
    ) -> list[RolloutTree]: ...


RolloutHost = EnvironmentHost | AgentHost
"""What answers the turns of rollouts, beside the model."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A turn that may be continued: its place, and all tokens up to its end."""

    tree: int
    segment: int
    place: tuple[int, ...]
    context: tuple[int, ...]


def sample_rollout_trees(
    plan: RolloutPlan,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    session: SamplingSession,
    dialogue: Dialogue,
    host: RolloutHost | None = None,
) -> list[RolloutTree]:
    """Samples the trees of all problems together: level by level, turn by turn with an environment,
    as the programs of agents ask for them, or by the schedule's own function.

    A turn's samples depend only on its problem's seed and on its place in the tree.

    Returns:
        Trees in the order of `problems`; in self-play two per problem, one for each player.

    Raises:
        PluginError: the schedule's own function fails, or returns something else.
    """
    if plan.own is not None:
        return sample_own_trees(plan.own, problems, seeds, session, dialogue)
    if plan.talk is not None:
        if isinstance(host, AgentHost):
            return host.sample_trees(plan.talk, problems, seeds, session, dialogue)
        assert host is not None
        return sample_conversations(plan.talk, problems, seeds, session, dialogue, host)
    return _sample_levels(plan, problems, seeds, session, dialogue)


def _sample_levels(
    plan: RolloutPlan,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    session: SamplingSession,
    dialogue: Dialogue,
) -> list[RolloutTree]:
    grown: list[list[Segment]] = [[] for _ in problems]
    above = [_Node(tree, NO_PARENT, (), ()) for tree in range(len(problems))]
    for number, level in enumerate(plan.levels, start=1):
        opened = []
        for node in above:
            own, problem, turn = grown[node.tree], problems[node.tree], level.turn
            if node.segment == NO_PARENT:
                prompt = encode_opening(
                    dialogue, turn.template, problem, plan.system, plan.examples, turn.prefix
                )
            else:
                text = fill_turn_template(dialogue, turn.template, problem)
                after = own[node.segment].token_ids
                prompt = TurnPrompt(text, encode_between_turns(dialogue, text, after, turn.prefix))
            own.append(prompt.to_segment("prompt", node.segment))
            context = node.context + prompt.token_ids
            opened.append(_Node(node.tree, len(own) - 1, node.place, context))
        requests = [
            CompletionRequest(
                node.context,
                None if number == 1 else order,
                tuple(
                    derive_seed(seeds[node.tree], "turn", *node.place, i)
                    for i in range(level.count)
                ),
                is_last=number == len(plan.levels),
            )
            for order, node in enumerate(opened)
        ]
        completions = session.generate(requests, level.turn)
        above = []
        for node, request, group in zip(opened, requests, completions, strict=True):
            for i, (completion, drawn) in enumerate(zip(group, request.seeds, strict=True)):
                sampled = build_turn_segment(
                    completion,
                    dialogue,
                    level.turn,
                    parent=node.segment,
                    number=number,
                    kind=level.kind,
                    seed=drawn,
                    context=request.context,
                )
                grown[node.tree].append(sampled)
                at, context = len(grown[node.tree]) - 1, node.context + sampled.token_ids
                above.append(_Node(node.tree, at, (*node.place, i), context))
    return [RolloutTree(p, tuple(s)) for p, s in zip(problems, grown, strict=True)]


def sample_own_trees(
    settings: Schedule,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    session: SamplingSession,
    dialogue: Dialogue,
) -> list[RolloutTree]:
    """Samples one tree per problem by the function that the schedule names."""
    sample: Callable[..., Any] = import_implementation(settings.implementation)
    try:
        trees = list(sample(settings, problems, seeds, session, dialogue))
    except RlxError:  # of the session, which names its cause
        raise
    except Exception as error:
        raise _build_fault(settings, f"{type(error).__name__}: {error}") from error
    if [getattr(tree, "problem", None) for tree in trees] != list(problems):
        raise _build_fault(settings, "it does not return one RolloutTree per problem, in order")
    for tree in trees:
        _check_turns(settings, tree)
    return trees


def _check_turns(settings: Schedule, tree: RolloutTree) -> None:
    found = Counter(segment.kind for segment in tree.segments if segment.author == "policy")
    if unknown := found.keys() - set(settings.turns):
        kinds = ", ".join(settings.turns)
        raise _build_fault(settings, f"a turn has the kind {min(unknown)!r}, not one of {kinds}")
    most = 1
    for level in settings.list_levels():
        most *= level.count
        if found[level.kind] > most:
            what = f"a tree has {found[level.kind]} turns {level.kind!r}, not {most}"
            raise _build_fault(settings, what)


def _build_fault(settings: Schedule, what: str) -> PluginError:
    return PluginError(f"schedule plugin {settings.schedule!r} failed to sample: {what}")
