"""Environments driven: rollouts of many turns, each answered before the next begins.

All rollouts of a batch take their turns together, and one that is done leaves: it has no further
turn, and so no part in anybody's figures.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlx.errors import SpecError
from rlx.plugin import FAILED, Action, Problem, Step
from rlx.rollout.dialogue import Dialogue, TurnPrompt
from rlx.rollout.host import EnvironmentHost, HostFault
from rlx.rollout.session import Completion, CompletionRequest, SamplingSession
from rlx.rollout.spans import find_spans
from rlx.rollout.tree import NO_PARENT, RolloutTree, Segment, Span
from rlx.seeding import derive_seed
from rlx.spec import EnvironmentRolloutSpec, ForcedAnswer, TurnSpec

__all__ = ["EnvironmentPlan", "build_talk", "is_fault_segment", "sample_conversations"]


@dataclass(frozen=True, slots=True)
class EnvironmentPlan:
    """How rollouts and an environment take turns.

    Attributes:
        count: rollouts per problem.
        turn: how every turn is sampled; its template opens the first.
        max_turns: regular turns.
        forced_answer: one more for those that are not done by then; None ends them.
        inline: whether observations stand right behind a turn, without a message of their own.
        on_error: what a rollout's fault drops.
        system: system message where a problem brings none of its own.
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
        """How turn number `number` is sampled."""
        forced = self.forced_answer
        if number <= self.max_turns or forced is None or forced.max_new_tokens is None:
            return self.turn
        return self.turn.model_copy(update={"max_new_tokens": forced.max_new_tokens})

    def opening(self, problem: Problem, dialogue: Dialogue) -> TurnPrompt:
        """What the first turn follows."""
        text = self.turn.template.replace("{prompt}", problem.prompt)
        return TurnPrompt(text, dialogue.open(text, problem.system or self.system))

    def action(self, text: str, spans: Mapping[str, str], number: int, finish: str) -> Action:
        """A turn, as the environment sees it."""
        return Action(
            text=text,
            spans=spans,
            number=number,
            turns_left=max(0, self.max_turns - number),
            forced=number > self.max_turns,
            finish_reason=finish,
        )

    def build_turn_text(self, observation: str, number: int) -> str:
        """The text that turn number `number` is given, an observation and perhaps an order."""
        forced = self.forced_answer
        return observation + (forced.template if forced and number == self.last else "")


def build_talk(spec: EnvironmentRolloutSpec) -> EnvironmentPlan:
    """The schedule of a spec."""
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
    """A rollout while it is going on: its chain, each segment the parent of the next.

    Attributes:
        tree: position of its problem.
        place: which of the problem's rollouts it is.
        state: the environment's.
        context: every token so far.
        completion: number of its last completion in the session's last call; None before any.
        chain: segments behind the prompt.
    """

    tree: int
    place: int
    state: Any
    context: tuple[int, ...]
    completion: int | None = None
    chain: list[Segment] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _SampledTurn:
    """A turn that was sampled and is not answered yet.

    Attributes:
        rollout: whose it is.
        number: in its rollout, from 1.
        seed: what it was drawn from.
        order: number of its completion in the session's call.
    """

    rollout: _OngoingRollout
    number: int
    seed: int
    order: int
    completion: Completion
    text: str
    spans: Mapping[str, Span]

    def action(self, plan: EnvironmentPlan) -> Action:
        """What the environment is told of it."""
        spans = {name: span.text for name, span in self.spans.items()}
        return plan.action(self.text, spans, self.number, self.completion.finish_reason)

    def segment(self, kind: str, info: Mapping[str, Any]) -> Segment:
        """What is kept of it, once the environment has said what it was."""
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
    """Samples `count` rollouts of every problem, turn by turn, all that are going on together.

    What is drawn for a turn depends on its problem's seed, on its rollout's place in the tree and
    on its number; what the environment says, on the rollout's problem, seed and turns. A rollout
    that outgrows the model ends before the turn that has no room, though not before the first.

    Returns:
        Trees in the order of `problems`, rollout by rollout below the prompt.
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
        completions = _sample_turns(live, drawn, number, sampling, session)
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
    """Those that the environment is ready for."""
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
) -> list[Completion]:
    """One turn of each, from its seed; the first turns of a problem share its prompt."""
    if number > 1:
        requests = [
            CompletionRequest(r.context, r.completion, (seed,))
            for r, seed in zip(live, drawn, strict=True)
        ]
    else:
        by_tree: dict[int, list[int]] = {}
        for rollout, seed in zip(live, drawn, strict=True):
            by_tree.setdefault(rollout.tree, []).append(seed)
        contexts = {r.tree: r.context for r in live}
        requests = [CompletionRequest(contexts[t], None, tuple(s)) for t, s in by_tree.items()]
    return [one for group in session.generate(requests, sampling) for one in group]


def _parse_turns(
    live: Sequence[_OngoingRollout],
    drawn: Sequence[int],
    completions: Sequence[Completion],
    number: int,
    sampling: TurnSpec,
    dialogue: Dialogue,
) -> Iterator[_SampledTurn]:
    """What each rollout said."""
    for order, (rollout, seed, completion) in enumerate(zip(live, drawn, completions, strict=True)):
        text, ends = dialogue.read(completion.token_ids)
        spans = find_spans(text, ends, sampling.spans, first_turn=number == 1)
        yield _SampledTurn(rollout, number, seed, order, completion, text, spans)


def _step_environment(
    plan: EnvironmentPlan, turns: Sequence[_SampledTurn], dialogue: Dialogue, host: EnvironmentHost
) -> Iterator[_OngoingRollout]:
    """Hands the turns to the environment, notes both, and yields the rollouts that go on."""
    calls = [(turn.rollout.state, turn.action(plan)) for turn in turns]
    for turn, step in zip(turns, host.step(calls), strict=True):
        rollout = turn.rollout
        if isinstance(step, HostFault):
            rollout.chain += turn.segment(FAILED, {}), _build_fault_segment(step, plan)
            continue
        rollout.chain.append(turn.segment(step.kind, step.info))
        if step.done:
            continue
        # Behind the last turn too: it was not done.
        shown = _encode_next_observation(plan, step, turn, dialogue)
        if isinstance(shown, HostFault):
            rollout.chain.append(_build_fault_segment(shown, plan))
            continue
        rollout.chain.append(_build_observation_segment(shown, step))
        rollout.context += turn.completion.token_ids + shown.token_ids
        rollout.completion, rollout.state = turn.order, step.state
        yield rollout


def _require_encodable_texts(plan: EnvironmentPlan, dialogue: Dialogue) -> None:
    """Sees that the experiment's own words can be shown, before an environment is blamed for them.

    Raises:
        SpecError: they cannot.
    """
    if plan.forced_answer is not None:
        try:
            dialogue.encode_observation(plan.forced_answer.template, (), inline=True)
        except SpecError as error:
            raise SpecError(f"rollout.forced_answer.template: {error}") from error


def _encode_next_observation(
    plan: EnvironmentPlan, step: Step, turn: _SampledTurn, dialogue: Dialogue
) -> TurnPrompt | HostFault:
    """What the next turn follows; what no token stands for is the environment's fault."""
    text = plan.build_turn_text(step.observation, turn.number + 1)
    try:
        return dialogue.encode_observation(text, turn.completion.token_ids, inline=plan.inline)
    except SpecError as error:
        return HostFault(f"its observation cannot be shown: {error}")


def _build_observation_segment(shown: TurnPrompt, step: Step) -> Segment:
    return Segment(
        parent=NO_PARENT,
        author="environment",
        token_ids=shown.token_ids,
        text=shown.text,
        info={} if step.anchor is None else {"state": step.anchor},
    )


def _build_fault_segment(fault: HostFault, plan: EnvironmentPlan) -> Segment:
    """What stands in the place of an environment's answer; whoever scores drops the rollout."""
    return Segment(
        parent=NO_PARENT,
        author="environment",
        token_ids=(),
        info={"fault": fault.reason, "on_error": plan.on_error},
    )


def is_fault_segment(segment: Segment) -> bool:
    """Whether it stands in the place of an answer that an environment did not give."""
    return segment.author == "environment" and "fault" in segment.info


def _flatten_chains(prompt: Segment, chains: Sequence[Sequence[Segment]]) -> Iterator[Segment]:
    """The prompt, then chain below chain, each segment told its parent."""
    yield prompt
    at = 0
    for chain in chains:
        parent = 0
        for segment in chain:
            at += 1
            yield replace(segment, parent=parent)
            parent = at
