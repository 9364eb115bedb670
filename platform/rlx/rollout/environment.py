"""Samples multi-turn rollouts with an environment, which answers each turn before the next begins.

All rollouts of a batch advance one turn at a time. A finished rollout leaves the batch: it has no
further turns and does not count in any statistic.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlx.errors import SpecError
from rlx.plugin import FAILED, Action, Problem, Step
from rlx.rollout.dialogue import Dialogue, TurnPrompt, encode_opening
from rlx.rollout.host import EnvironmentHost, HostFault
from rlx.rollout.session import Completion, CompletionRequest, SamplingSession
from rlx.rollout.spans import find_hull, find_spans
from rlx.rollout.tree import NO_PARENT, RolloutTree, Segment, Span
from rlx.seeding import derive_seed
from rlx.spec import EnvironmentRolloutSpec, ForcedAnswer, TurnSpec

__all__ = ["EnvironmentPlan", "build_talk", "is_fault_segment", "sample_conversations"]


@dataclass(frozen=True, slots=True)
class EnvironmentPlan:
    """How rollouts and an environment take turns.

    Attributes:
        count: rollouts per problem.
        turn: sampling settings of every turn; its template opens the first.
        max_turns: maximum number of regular turns.
        forced_answer: an extra turn for rollouts that are not done by then; None ends them instead.
        inline: whether observations directly follow a turn, without a message of their own.
        on_error: what to drop if a rollout has a fault.
        system: system message for problems without their own.
    """

    count: int
    turn: TurnSpec
    max_turns: int
    forced_answer: ForcedAnswer | None
    inline: bool
    on_error: Literal["fail", "drop_sample", "drop_group"]
    system: str = ""

    @property
    def last(self) -> int:
        """Number of the last turn that a rollout may have."""
        return self.max_turns + (self.forced_answer is not None)

    def sampling(self, number: int) -> TurnSpec:
        """Sampling settings of turn number `number`."""
        forced = self.forced_answer
        if number <= self.max_turns or forced is None or forced.max_new_tokens is None:
            return self.turn
        return self.turn.model_copy(update={"max_new_tokens": forced.max_new_tokens})

    def opening(self, problem: Problem, dialogue: Dialogue) -> TurnPrompt:
        """The prompt of the first turn."""
        return encode_opening(dialogue, self.turn.template, problem, self.system)

    def action(self, text: str, spans: Mapping[str, str], number: int, finish: str) -> Action:
        """A turn, as the environment receives it."""
        return Action(
            text=text,
            spans=spans,
            number=number,
            turns_left=max(0, self.max_turns - number),
            forced=number > self.max_turns,
            finish_reason=finish,
        )

    def build_turn_text(self, observation: str, number: int) -> str:
        """The prompt of turn number `number`: an observation, and the order to answer if forced."""
        forced = self.forced_answer
        return observation + (forced.template if forced and number == self.last else "")


def build_talk(spec: EnvironmentRolloutSpec) -> EnvironmentPlan:
    """Builds the plan of a spec."""
    return EnvironmentPlan(
        count=spec.num_generations,
        turn=spec.turn,
        max_turns=spec.max_turns,
        forced_answer=spec.forced_answer,
        inline=spec.observation == "inline",
        on_error=spec.environment.on_error,
        system=spec.system,
    )


@dataclass(slots=True)
class _OngoingRollout:
    """An unfinished rollout: a chain of segments, each the parent of the next.

    Attributes:
        tree: index of its problem.
        place: index among the problem's rollouts.
        state: state of the environment.
        context: all tokens so far.
        completion: index of its last completion in the session's last call; None before any.
        chain: segments after the prompt.
    """

    tree: int
    place: int
    state: Any
    context: tuple[int, ...]
    completion: int | None = None
    chain: list[Segment] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _SampledTurn:
    """A turn that was sampled and has no answer yet.

    Attributes:
        rollout: the rollout of the turn.
        number: number in its rollout, from 1.
        seed: sampling seed.
        order: index of its completion in the session's call.
    """

    rollout: _OngoingRollout
    number: int
    seed: int
    order: int
    completion: Completion
    text: str
    spans: Mapping[str, Span]
    hull: tuple[int, int] | None

    def action(self, plan: EnvironmentPlan) -> Action:
        """The turn, as the environment receives it."""
        spans = {name: span.text for name, span in self.spans.items()}
        return plan.action(self.text, spans, self.number, self.completion.finish_reason)

    def segment(self, kind: str, info: Mapping[str, Any]) -> Segment:
        """Builds the turn's segment, with the kind and info that the environment reported."""
        return Segment(
            parent=NO_PARENT,
            author="policy",
            token_ids=self.completion.token_ids,
            turn=self.number,
            kind=kind,
            logprobs=self.completion.logprobs,
            finish_reason=self.completion.finish_reason,
            text=self.text,
            spans=self.spans,
            hull=self.hull,
            seed=self.seed,
            info=info,
        )


def sample_conversations(
    plan: EnvironmentPlan,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    session: SamplingSession,
    dialogue: Dialogue,
    host: EnvironmentHost,
) -> list[RolloutTree]:
    """Samples `count` rollouts of every problem, one turn at a time for all unfinished rollouts.

    A turn's samples depend only on its problem's seed, its rollout's place in the tree and its
    number. The environment's answers depend only on the rollout's problem, seed and turns. If a
    rollout outgrows the model's context, it ends before the turn that does not fit, but not before
    its first turn.

    Returns:
        Trees in the order of `problems`, with rollouts in order below the prompt.
    """
    _require_encodable_texts(plan, dialogue)
    prompts = [
        Segment(parent=NO_PARENT, author="prompt", token_ids=opening.token_ids, text=opening.text)
        for opening in (plan.opening(problem, dialogue) for problem in problems)
    ]
    rollouts = [
        _OngoingRollout(t, i, None, prompts[t].token_ids)
        for t in range(len(problems))
        for i in range(plan.count)
    ]
    live = list(_start_rollouts(rollouts, problems, seeds, host, plan))
    for number in range(1, plan.last + 1):
        sampling = plan.sampling(number)
        room = session.context_length - sampling.max_new_tokens
        live = [r for r in live if number == 1 or len(r.context) <= room]
        if not live:
            break
        drawn = [derive_seed(seeds[r.tree], "turn", r.place, number) for r in live]
        is_last = number == plan.last
        completions = _sample_turns(live, drawn, number, sampling, session, is_last=is_last)
        turns = _parse_turns(live, drawn, completions, number, sampling, dialogue)
        live = list(_step_environment(plan, list(turns), dialogue, host))
    chains: list[list[list[Segment]]] = [[] for _ in problems]
    for rollout in rollouts:
        chains[rollout.tree].append(rollout.chain)
    return [
        RolloutTree(problem, tuple(_flatten_chains(prompt, below)))
        for problem, prompt, below in zip(problems, prompts, chains, strict=True)
    ]


def _start_rollouts(
    rollouts: Sequence[_OngoingRollout],
    problems: Sequence[Problem],
    seeds: Sequence[int],
    host: EnvironmentHost,
    plan: EnvironmentPlan,
) -> Iterator[_OngoingRollout]:
    """Returns the rollouts whose environment could be reset."""
    calls = [
        (problems[r.tree].fields, derive_seed(seeds[r.tree], "environment", r.place))
        for r in rollouts
    ]
    for rollout, state in zip(rollouts, host.reset(calls), strict=True):
        if isinstance(state, HostFault):
            rollout.chain.append(_build_fault_segment(state, plan))
        else:
            rollout.state = state
            yield rollout


def _sample_turns(
    live: Sequence[_OngoingRollout],
    drawn: Sequence[int],
    number: int,
    sampling: TurnSpec,
    session: SamplingSession,
    *,
    is_last: bool,
) -> list[Completion]:
    """Samples one turn of each rollout from its seed; first turns of a problem share its prompt."""
    if number > 1:
        requests = [
            CompletionRequest(r.context, r.completion, (seed,), is_last)
            for r, seed in zip(live, drawn, strict=True)
        ]
    else:
        by_tree: dict[int, list[int]] = {}
        for rollout, seed in zip(live, drawn, strict=True):
            by_tree.setdefault(rollout.tree, []).append(seed)
        contexts = {r.tree: r.context for r in live}
        requests = [
            CompletionRequest(contexts[t], None, tuple(s), is_last) for t, s in by_tree.items()
        ]
    return [one for group in session.generate(requests, sampling) for one in group]


def _parse_turns(
    live: Sequence[_OngoingRollout],
    drawn: Sequence[int],
    completions: Sequence[Completion],
    number: int,
    sampling: TurnSpec,
    dialogue: Dialogue,
) -> Iterator[_SampledTurn]:
    """Parses the completion of each rollout."""
    for order, (rollout, seed, completion) in enumerate(zip(live, drawn, completions, strict=True)):
        text, ends = dialogue.read(completion.token_ids)
        spans = find_spans(text, ends, sampling.spans, first_turn=number == 1)
        hull = find_hull(text, ends, sampling.spans, first_turn=number == 1)
        yield _SampledTurn(rollout, number, seed, order, completion, text, spans, hull)


def _step_environment(
    plan: EnvironmentPlan, turns: Sequence[_SampledTurn], dialogue: Dialogue, host: EnvironmentHost
) -> Iterator[_OngoingRollout]:
    """Passes the turns to the environment, records both, and yields the rollouts that continue."""
    calls = [(turn.rollout.state, turn.action(plan)) for turn in turns]
    for turn, step in zip(turns, host.step(calls), strict=True):
        rollout = turn.rollout
        if isinstance(step, HostFault):
            rollout.chain += turn.segment(FAILED, {}), _build_fault_segment(step, plan)
            continue
        rollout.chain.append(turn.segment(step.kind, step.info))
        if step.done:
            continue
        # Also after the last turn, because it was not done.
        prompt = _encode_next_observation(plan, step, turn, dialogue)
        if isinstance(prompt, HostFault):
            rollout.chain.append(_build_fault_segment(prompt, plan))
            continue
        rollout.chain.append(_build_observation_segment(prompt, step))
        rollout.context += turn.completion.token_ids + prompt.token_ids
        rollout.completion, rollout.state = turn.order, step.state
        yield rollout


def _require_encodable_texts(plan: EnvironmentPlan, dialogue: Dialogue) -> None:
    """Checks that the experiment's own texts can be encoded before blaming an environment.

    Raises:
        SpecError: they cannot be encoded.
    """
    if plan.forced_answer is not None:
        try:
            dialogue.encode_observation(plan.forced_answer.template, (), inline=True)
        except SpecError as error:
            raise SpecError(f"rollout.forced_answer.template: {error}") from error


def _encode_next_observation(
    plan: EnvironmentPlan, step: Step, turn: _SampledTurn, dialogue: Dialogue
) -> TurnPrompt | HostFault:
    """The prompt of the next turn; text that cannot be encoded is the environment's fault."""
    text = plan.build_turn_text(step.observation, turn.number + 1)
    try:
        return dialogue.encode_observation(text, turn.completion.token_ids, inline=plan.inline)
    except SpecError as error:
        return HostFault(f"its observation cannot be shown: {error}")


def _build_observation_segment(prompt: TurnPrompt, step: Step) -> Segment:
    return Segment(
        parent=NO_PARENT,
        author="environment",
        token_ids=prompt.token_ids,
        text=prompt.text,
        info={} if step.anchor is None else {"state": step.anchor},
    )


def _build_fault_segment(fault: HostFault, plan: EnvironmentPlan) -> Segment:
    """A segment in place of an environment's answer; scoring drops the rollout."""
    return Segment(
        parent=NO_PARENT,
        author="environment",
        token_ids=(),
        info={"fault": fault.reason, "on_error": plan.on_error},
    )


def is_fault_segment(segment: Segment) -> bool:
    """Whether a segment replaces an answer that the environment failed to give."""
    return segment.author == "environment" and "fault" in segment.info


def _flatten_chains(prompt: Segment, chains: Sequence[Sequence[Segment]]) -> Iterator[Segment]:
    """Yields the prompt, then chain after chain, with the parent of each segment set."""
    yield prompt
    at = 0
    for chain in chains:
        parent = 0
        for segment in chain:
            at += 1
            yield replace(segment, parent=parent)
            parent = at
