"""Runs a probe: samples answers, cuts their reasoning, samples and scores continuations, as in
training.

The values of VinePPO are sampled here too: a state is a response cut between two of its steps, and
its value the mean score of continuations, sampled with the turn's own settings.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlx.errors import RewardError
from rlx.evaluation import collect_stated_confidences
from rlx.plugin import Canonical, Problem, Task
from rlx.probe.questions import (
    AssembledResponse,
    CutPoint,
    ProbeQuestion,
    Reasoning,
    build_probe_questions,
    build_response_tree,
    close_forced_answer,
    cut_points,
    find_reasoning,
    sample_continuations,
)
from rlx.reward import NamedReward, RewardEntry, RewardPool, RewardTable, score_rollouts
from rlx.rollout import (
    Completion,
    CompletionRequest,
    Dialogue,
    RolloutPlan,
    RolloutTree,
    Sampler,
    find_spans,
    sample_rollout_trees,
)
from rlx.seeding import derive_seed
from rlx.spec import Cut, ProbeSpec, Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeContext:
    """The model under probe, and the recipe that scores it: `plan` has one answer per problem, and
    a turn is correct whose reward named `correct` is 1."""

    plan: RolloutPlan
    sampler: Sampler
    speech: Dialogue
    task: Task
    rewards: Sequence[NamedReward]
    correct: str
    pool: RewardPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedAnswer:
    """A problem and the answer whose reasoning is probed.

    Attributes:
        text: the whole response.
        answer: canonical text of its answer span; None if there is none.
        correct: whether it is correct; None if it could not be scored.
        confidences: confidences stated for it, nan if unreadable.
        reasoning: None if it has none, in which case it is not probed.
        prompt_ids, turn_ids: tokens before the response, and of it.
    """

    problem: Problem
    text: str
    answer: str | None
    correct: bool | None
    confidences: tuple[float, ...]
    reasoning: Reasoning | None
    prompt_ids: tuple[int, ...]
    turn_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSample:
    """One continuation.

    Attributes:
        answered: index of the answer it belongs to.
        scheme, point: how and where the reasoning was cut.
        response: the whole response, as scored.
        given: number of its leading tokens that were not sampled for this continuation.
        wrapped: whether the end of the answer had to be added.
        correct: whether it is correct; None if it could not be scored.
        same: whether it gives the same answer as the whole response; None if that gives none.
    """

    answered: int
    scheme: Scheme
    point: CutPoint
    seed: int
    response: AssembledResponse
    given: int
    wrapped: bool
    rewards: Mapping[str, RewardEntry]
    global_rewards: Mapping[str, RewardEntry]
    correct: bool | None
    same: bool | None

    @property
    def tokens(self) -> int:
        return len(self.response.token_ids) - self.given


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Probed answers in order of problems, and continuations by answer, scheme and point."""

    answered: tuple[ProbedAnswer, ...]
    samples: tuple[ProbeSample, ...]


def probe_model(
    spec: ProbeSpec,
    context: ProbeContext,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    show: Callable[[int, int], None] = lambda done, total: None,
) -> ProbeResult:
    """Probes a model on `problems`; everything sampled for one derives from its seed."""
    with context.sampler.session() as session:
        trees = sample_rollout_trees(context.plan, problems, seeds, session, context.speech)
    table = score_rollouts(trees, context.rewards, context.pool)
    places = [(t, tree.policy_segments[0]) for t, tree in enumerate(trees)]
    stated = collect_stated_confidences(trees, table, places)
    answered: list[ProbedAnswer] = []
    samples: list[ProbeSample] = []
    for (number, first), confidences in zip(places, stated, strict=True):
        show(number, len(trees))
        tree, seed = trees[number], seeds[number]
        turn = tree.segments[first]
        _, ends = context.speech.read(turn.token_ids)
        one = ProbedAnswer(
            problem=tree.problem,
            text=turn.text,
            answer=_parse_canonical_answer(turn.text, spec, context.task),
            correct=_is_correct(table, (number, first), context.correct),
            confidences=tuple(confidences),
            reasoning=find_reasoning(turn, ends, spec.span),
            prompt_ids=tree.token_ids(turn.parent),
            turn_ids=turn.token_ids,
        )
        answered.append(one)
        if one.reasoning is not None:
            questions = build_probe_questions(
                turn, one.reasoning, spec, context.speech, context.task, seed
            )
            samples += _score_continuations(number, one, questions, spec, context, seed)
    show(len(trees), len(trees))
    return ProbeResult(tuple(answered), tuple(samples))


def _is_correct(table: RewardTable, place: tuple[int, int], name: str) -> bool | None:
    raw = table.turns[place][name].raw
    return None if raw is None else raw == 1.0


def _parse_canonical_answer(text: str, spec: ProbeSpec, task: Task) -> str | None:
    """Text of the answer span in a canonical form, equal for answers that mean the same."""
    name = spec.close.strip("</>")
    span = find_spans(text, range(1, len(text) + 1), (name,)).get(name)
    if span is None:
        return None
    if isinstance(task, Canonical):
        return task.canonical(span.text.strip())
    return "".join(span.text.split()).casefold()


def _score_continuations(
    number: int,
    answered: ProbedAnswer,
    questions: Sequence[ProbeQuestion],
    spec: ProbeSpec,
    context: ProbeContext,
    seed: int,
) -> Iterator[ProbeSample]:
    """Samples and scores the continuations of every question; each question is a reward group."""
    drawn: list[tuple[ProbeQuestion, list[tuple[AssembledResponse, bool]]]] = []
    for forced in (True, False):
        if those := [q for q in questions if q.forced is forced]:
            groups = _sample_answers_to(those, answered, spec, context, seed)
            drawn += zip(those, groups, strict=True)
    level = context.plan.levels[0]
    trees = [
        build_response_tree(
            answered.problem, answered.prompt_ids, level, [response for response, _ in group]
        )
        for _, group in drawn
    ]
    table = score_rollouts(trees, context.rewards, context.pool)
    for tree, (question, group) in enumerate(drawn):
        for i, (response, wrapped) in enumerate(group):
            answer, segment = _parse_canonical_answer(response.text, spec, context.task), i + 1
            yield ProbeSample(
                answered=number,
                scheme=question.scheme,
                point=question.point,
                seed=_derive_sample_seed(seed, question, i),
                response=response,
                given=len(question.turn_ids),
                wrapped=wrapped,
                rewards=table.turns[tree, segment],
                global_rewards=table.rollouts[tree, segment],
                correct=_is_correct(table, (tree, segment), context.correct),
                same=None if answered.answer is None else answer == answered.answer,
            )


def _derive_sample_seed(seed: int, question: ProbeQuestion, number: int) -> int:
    return derive_seed(seed, question.scheme, question.point.number, number)


def _sample_answers_to(
    questions: Sequence[ProbeQuestion],
    answered: ProbedAnswer,
    spec: ProbeSpec,
    context: ProbeContext,
    seed: int,
) -> list[list[tuple[AssembledResponse, bool]]]:
    """Continues questions that are all forced, or none; returns the responses, and whether the end
    of their answer had to be added. Forced answers have a short budget and stop at their end."""
    requests = [
        CompletionRequest(
            (*answered.prompt_ids, *question.turn_ids),
            None,
            tuple(_derive_sample_seed(seed, question, i) for i in range(spec.samples)),
            is_last=True,
        )
        for question in questions
    ]
    turn = context.plan.levels[0].turn
    rooms = [turn.max_new_tokens - len(question.turn_ids) for question in questions]
    if questions[0].forced:
        turn = turn.model_copy(update={"stop": (spec.close,)})
        rooms = [spec.max_new_tokens] * len(questions)
    groups = sample_continuations(context.sampler, requests, turn, rooms)

    def assemble(question: ProbeQuestion, one: Completion) -> tuple[AssembledResponse, bool]:
        # Given and sampled tokens are decoded together: separately they may decode differently.
        ids = (*question.turn_ids, *one.token_ids)
        whole, ends = context.speech.read(ids)
        text, wrapped = close_forced_answer(question, whole, ends[len(question.turn_ids) - 1], spec)
        reason = "stop" if question.forced else one.finish_reason
        return AssembledResponse(ids, text, reason), wrapped

    return [
        [assemble(question, one) for one in group]
        for question, group in zip(questions, groups, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ValuedResponse:
    """A sampled response, as one reasoning, whose states are valued from `seed`."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    whole: Reasoning
    seed: int


@dataclass(frozen=True, slots=True)
class StateValues:
    """Values of the states of one response.

    Attributes:
        borders: `S + 1` numbers of response tokens before each state, from 0 to all tokens.
        values: mean score of the continuations from each state; 0 after the finished response.
        tokens: number of sampled tokens.
    """

    borders: tuple[int, ...]
    values: tuple[float, ...]
    tokens: int


def build_probe_response(
    tree: RolloutTree, segment: int, context: ProbeContext, seed: int
) -> ValuedResponse:
    turn = tree.segments[segment]
    text, ends = context.speech.read(turn.token_ids)
    whole = Reasoning(start=0, token_ids=turn.token_ids, text=text, ends=ends)
    return ValuedResponse(tree.problem, tree.token_ids(turn.parent), whole, seed)


def state_values(
    responses: Sequence[ValuedResponse], context: ProbeContext, cut: Cut, samples: int
) -> list[StateValues]:
    """Estimates the value of every state of every response, whose steps end at `cut`, from
    `samples` continuations each.

    Raises:
        RewardError: no continuation of some state could be scored.
    """
    borders = [tuple(p.tokens for p in cut_points(r.whole, cut)) for r in responses]
    # The last border is the end of the response, which is not continued.
    states = [(n, s, b) for n, cuts in enumerate(borders) for s, b in enumerate(cuts[:-1])]
    drawn = _sample_state_continuations(responses, states, context, samples)
    trees, level = [], context.plan.levels[0]
    for (n, _, border), group in zip(states, drawn, strict=True):
        one, written = responses[n], []
        for completion in group:
            ids = (*one.whole.token_ids[:border], *completion.token_ids)
            text, _ = context.speech.read(ids)
            written.append(AssembledResponse(ids, text, completion.finish_reason))
        trees.append(build_response_tree(one.problem, one.prompt_ids, level, written))
    table = score_rollouts(trees, context.rewards, context.pool)
    found: list[list[float]] = [[] for _ in responses]
    spent = [0] * len(responses)
    for at, ((n, _, _), group) in enumerate(zip(states, drawn, strict=True)):
        scores = [table.total_score(at, (segment,)) for segment in range(1, len(group) + 1)]
        known = [score for score in scores if score is not None]
        if not known:  # an unknown value must not be taken for 0
            raise RewardError("no continuation from some state of a response could be scored")
        found[n].append(sum(known) / len(known))
        spent[n] += sum(len(c.token_ids) for c in group)
    return [
        StateValues(cuts, (*values, 0.0), tokens)
        for cuts, values, tokens in zip(borders, found, spent, strict=True)
    ]


def _sample_state_continuations(
    responses: Sequence[ValuedResponse],
    states: Sequence[tuple[int, int, int]],
    context: ProbeContext,
    samples: int,
) -> list[list[Completion]]:
    """Samples continuations from every state, each with the turn's remaining token budget. The k-th
    states of all responses are sampled together, whose budgets are alike."""
    turn = context.plan.levels[0].turn
    drawn: dict[int, list[Completion]] = {}
    for number in sorted({s for _, s, _ in states}):
        those = [at for at, (_, s, _) in enumerate(states) if s == number]
        requests = []
        for n, _, border in (states[at] for at in those):
            one = responses[n]
            seeds = tuple(derive_seed(one.seed, "state", number, i) for i in range(samples))
            kept = (*one.prompt_ids, *one.whole.token_ids[:border])
            requests.append(CompletionRequest(kept, None, seeds, is_last=True))
        rooms = [turn.max_new_tokens - states[at][2] for at in those]
        groups = sample_continuations(context.sampler, requests, turn, rooms)
        drawn |= dict(zip(those, groups, strict=True))
    return [drawn[at] for at in range(len(states))]
