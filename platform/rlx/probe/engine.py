"""Run a probe: sample answers, cut their reasoning, then sample and score continuations.

Scoring uses `rlx.reward.score_rollouts` with the experiment's own reward objects, as in training.

"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlx.evaluation import collect_stated_confidences
from rlx.plugin import Canonical, Problem, Task
from rlx.probe.questions import (
    AssembledResponse,
    CutPoint,
    ProbeDialogue,
    ProbeQuestion,
    Reasoning,
    build_probe_questions,
    build_response_tree,
    close_forced_answer,
    find_reasoning,
    truncate_completion,
)
from rlx.reward import NamedReward, RewardEntry, RewardPool, RewardTable, score_rollouts
from rlx.rollout import (
    Completion,
    CompletionRequest,
    PromptFit,
    RolloutPlan,
    RolloutTree,
    Sampler,
    find_spans,
    sample_rollout_trees,
)
from rlx.seeding import derive_seed
from rlx.spec import ProbeSpec, Scheme, TurnSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeContext:
    """The model under probe, and the recipe that scores it.

    Attributes:
        plan: rollout plan with one answer per problem; deeper levels as in training.
        sampler: sampler of the probed model.
        speech: converts text to tokens and back.
        task: source of problems.
        rewards: the experiment's rewards.
        correct: name of the turn reward whose value 1 means that an answer is correct.
        pool: workers that score rewards.
        fit: which problems the model can be shown; None shows every one as it is.
    """

    plan: RolloutPlan
    sampler: Sampler
    speech: ProbeDialogue
    task: Task
    rewards: Sequence[NamedReward]
    correct: str
    pool: RewardPool
    fit: PromptFit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedAnswer:
    """A problem and the answer whose reasoning is probed.

    Attributes:
        problem: the problem.
        text: the whole response.
        answer: canonical text of its answer span; None if there is none.
        correct: whether it is correct; None if it could not be scored.
        confidences: confidences stated for it, nan if unreadable.
        reasoning: its reasoning; None if it has none, in which case it is not probed.
        prompt_ids: tokens before the response.
        turn_ids: tokens of the response.
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
        seed: its sampling seed.
        response: the whole response, as scored.
        given: number of its leading tokens that were not sampled for this continuation.
        wrapped: whether the end of the answer had to be added.
        rewards: turn rewards, by name.
        global_rewards: global rewards, by name.
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
        """Number of tokens sampled for this continuation."""
        return len(self.response.token_ids) - self.given


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Results of one probe.

    Attributes:
        answered: the probed answers, in order of problems.
        samples: continuations, in order of answers, schemes and points.
    """

    answered: tuple[ProbedAnswer, ...]
    samples: tuple[ProbeSample, ...]


def probe_model(
    spec: ProbeSpec,
    context: ProbeContext,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    show: Callable[[int, int], None] = lambda done, total: None,
) -> ProbeResult:
    """Probes a model on `problems`.

    Args:
        spec: cuts, schemes and number of samples.
        context: the model and the recipe.
        problems: the problems.
        seeds: one seed per problem, from which everything sampled for it is derived.
        show: called with the number of finished problems and their total.
    """
    trees, table = _sample_answers(context, problems, seeds)
    stated = collect_stated_confidences(
        trees, table, [(t, x.policy_segments[0]) for t, x in enumerate(trees)]
    )
    answered = tuple(
        _build_probed_answer(tree, t, table, tuple(stated[t]), spec, context)
        for t, tree in enumerate(trees)
    )
    samples: list[ProbeSample] = []
    for number, (one, tree) in enumerate(zip(answered, trees, strict=True)):
        show(number, len(answered))
        if one.reasoning is None:
            continue
        turn = tree.segments[tree.policy_segments[0]]
        questions = build_probe_questions(
            turn, one.reasoning, spec, context.speech, context.task, seeds[number]
        )
        samples += _score_continuations(number, one, questions, spec, context, seeds[number])
    show(len(answered), len(answered))
    return ProbeResult(answered, tuple(samples))


def _sample_answers(
    context: ProbeContext, problems: Sequence[Problem], seeds: Sequence[int]
) -> tuple[list[RolloutTree], RewardTable]:
    with context.sampler.session() as session:
        trees = sample_rollout_trees(context.plan, problems, seeds, session, context.speech)
    return trees, score_rollouts(trees, context.rewards, context.pool)


def _build_probed_answer(
    tree: RolloutTree,
    number: int,
    table: RewardTable,
    stated: tuple[float, ...],
    spec: ProbeSpec,
    context: ProbeContext,
) -> ProbedAnswer:
    place = (number, tree.policy_segments[0])
    turn = tree.segments[place[1]]
    _, ends = context.speech.read(turn.token_ids)
    return ProbedAnswer(
        problem=tree.problem,
        text=turn.text,
        answer=_parse_canonical_answer(turn.text, spec, context.task),
        correct=_is_correct(table, place, context.correct),
        confidences=stated,
        reasoning=find_reasoning(turn, ends, spec.span),
        prompt_ids=tree.token_ids(turn.parent),
        turn_ids=turn.token_ids,
    )


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


def _build_turn_spec(question: ProbeQuestion, spec: ProbeSpec, context: ProbeContext) -> TurnSpec:
    """Sampling settings of a question's continuations: the turn's own, with its remaining token
    budget; for a forced answer, a short budget that stops at the answer's end."""
    own = context.plan.levels[0].turn
    if not question.forced:
        left = max(1, own.max_new_tokens - len(question.turn_ids))
        return own.model_copy(update={"max_new_tokens": left})
    return own.model_copy(update={"max_new_tokens": spec.max_new_tokens, "stop": (spec.close,)})


@dataclass(frozen=True, slots=True)
class _ProbeContinuation:
    """A continuation before it is scored."""

    seed: int
    response: AssembledResponse
    wrapped: bool


def _score_continuations(
    number: int,
    answered: ProbedAnswer,
    questions: Sequence[ProbeQuestion],
    spec: ProbeSpec,
    context: ProbeContext,
    seed: int,
) -> Iterator[ProbeSample]:
    """Samples and scores the continuations of every question; each question is a reward group."""
    drawn: list[tuple[ProbeQuestion, list[_ProbeContinuation]]] = []
    for forced in (True, False):
        those = [q for q in questions if q.forced is forced]
        if those:
            drawn += zip(
                those, _sample_continuations(those, answered, spec, context, seed), strict=True
            )
    level = context.plan.levels[0]
    trees = [
        build_response_tree(
            answered.problem, answered.prompt_ids, level, [one.response for one in group]
        )
        for _, group in drawn
    ]
    table = score_rollouts(trees, context.rewards, context.pool)
    for tree, (question, group) in enumerate(drawn):
        for segment, one in enumerate(group, start=1):
            answer = _parse_canonical_answer(one.response.text, spec, context.task)
            yield ProbeSample(
                answered=number,
                scheme=question.scheme,
                point=question.point,
                seed=one.seed,
                response=one.response,
                given=len(question.turn_ids),
                wrapped=one.wrapped,
                rewards=table.turns[tree, segment],
                global_rewards=table.rollouts[tree, segment],
                correct=_is_correct(table, (tree, segment), context.correct),
                same=None if answered.answer is None else answer == answered.answer,
            )


def _sample_continuations(
    questions: Sequence[ProbeQuestion],
    answered: ProbedAnswer,
    spec: ProbeSpec,
    context: ProbeContext,
    seed: int,
) -> list[list[_ProbeContinuation]]:
    """Samples the continuations of every question, with one prefill per question."""
    requests = [
        CompletionRequest(
            (*answered.prompt_ids, *question.turn_ids),
            None,
            tuple(
                derive_seed(seed, question.scheme, question.point.number, i)
                for i in range(spec.samples)
            ),
            is_last=True,
        )
        for question in questions
    ]
    turns = [_build_turn_spec(question, spec, context) for question in questions]
    # Sample all with the largest budget, then truncate each to its own.
    with context.sampler.session() as session:
        groups = session.generate(requests, max(turns, key=lambda turn: turn.max_new_tokens))
    return [
        [
            _build_drawn_response(
                question,
                own,
                truncate_completion(completion, turn.max_new_tokens),
                spec,
                context.speech,
            )
            for own, completion in zip(request.seeds, group, strict=True)
        ]
        for question, turn, request, group in zip(questions, turns, requests, groups, strict=True)
    ]


def _build_drawn_response(
    question: ProbeQuestion,
    seed: int,
    completion: Completion,
    spec: ProbeSpec,
    speech: ProbeDialogue,
) -> _ProbeContinuation:
    """Decodes given and sampled tokens together, since separately they may decode differently."""
    ids = (*question.turn_ids, *completion.token_ids)
    whole, ends = speech.read(ids)
    prefix_length = ends[len(question.turn_ids) - 1]
    text, wrapped = close_forced_answer(question, whole, prefix_length, spec)
    reason = "stop" if question.forced else completion.finish_reason
    return _ProbeContinuation(seed, AssembledResponse(ids, text, reason), wrapped)
