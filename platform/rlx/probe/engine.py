"""Asking: answers are sampled, their reasoning is cut, and what follows is sampled and scored.

Scoring is `rlx.reward.score` with the experiment's own rewards: the very objects that training
uses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlx.evaluation import collect_stated_confidences
from rlx.plugin import Canonical, Problem, Task
from rlx.probe.cuts import CutPoint, Reasoning, find_reasoning
from rlx.probe.questions import (
    ProbeDialogue,
    ProbeQuestion,
    build_probe_questions,
    close_forced_answer,
)
from rlx.probe.responses import AssembledResponse, build_response_tree, truncate_completion
from rlx.reward import NamedReward, RewardEntry, RewardPool, RewardTable, score_rollouts
from rlx.rollout import (
    Completion,
    CompletionRequest,
    RolloutPlan,
    RolloutTree,
    Sampler,
    find_spans,
    sample_rollout_trees,
)
from rlx.seeding import derive_seed
from rlx.spec import ProbeSpec, Scheme, TurnSpec

__all__ = ["ProbeContext", "ProbeResult", "ProbeSample", "ProbedAnswer", "probe_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeContext:
    """What a probe works with.

    Attributes:
        plan: one answer per problem, and below it what the schedule has.
        sampler: of the model that is probed.
        speech: text to tokens and back.
        task: where problems come from.
        rewards: the experiment's.
        correct: name of the turn reward that says, by the value 1, that an answer is correct.
        pool: where rewards run.
    """

    plan: RolloutPlan
    sampler: Sampler
    speech: ProbeDialogue
    task: Task
    rewards: Sequence[NamedReward]
    correct: str
    pool: RewardPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedAnswer:
    """A problem and the answer whose reasoning is probed.

    Attributes:
        problem: what was asked.
        text: the whole response.
        answer: what stands in its answer span, canonical; None without one.
        correct: whether it is right; None where it could not be scored.
        confidences: stated for it, nan where one could not be read.
        reasoning: None where the response has none, and nothing was probed.
        prompt_ids: tokens before the response.
        turn_ids: its own.
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
        answered: position of the answer it belongs to.
        scheme, point: how and where the reasoning was cut.
        seed: what it was drawn from.
        response: all of it, as scored.
        given: tokens of it that were not drawn, but sampled before or put there.
        wrapped: the end of the answer was added.
        rewards: of the turn, by name.
        global_rewards: of the whole rollout, by name.
        correct: None where it could not be scored.
        same: it gives the same answer as the whole response; None where that gives none.
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
        """How many were drawn."""
        return len(self.response.token_ids) - self.given


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Everything that one probe found.

    Attributes:
        answered: in the order of the problems.
        samples: in the order of the answers, schemes and points.
        unprobed: answers left out because the budget of tokens was used up.
    """

    answered: tuple[ProbedAnswer, ...]
    samples: tuple[ProbeSample, ...]
    unprobed: int


def probe_model(
    spec: ProbeSpec,
    means: ProbeContext,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    show: Callable[[int, int], None] = lambda done, total: None,
) -> ProbeResult:
    """Probes a model on `problems`.

    Args:
        spec: where and how.
        means: with what.
        problems: what is asked.
        seeds: one per problem; everything drawn for it comes from its own.
        show: told how many problems are done.
    """
    trees, table = _sample_answers(means, problems, seeds)
    stated = collect_stated_confidences(
        trees, table, [(t, x.policy_segments[0]) for t, x in enumerate(trees)]
    )
    answered = tuple(
        _build_probed_answer(tree, t, table, tuple(stated[t]), spec, means)
        for t, tree in enumerate(trees)
    )
    samples: list[ProbeSample] = []
    left, unprobed = spec.max_tokens, 0
    if left is not None:
        left -= sum(len(t.segments[s].token_ids) for t in trees for s in t.policy_segments)
    for number, (one, tree) in enumerate(zip(answered, trees, strict=True)):
        show(number, len(answered))
        if one.reasoning is None:
            continue
        turn = tree.segments[tree.policy_segments[0]]
        asked = build_probe_questions(
            turn, one.reasoning, spec, means.speech, means.task, seeds[number]
        )
        most = sum(spec.samples * _get_token_budget(q, spec, means) for q in asked)
        if left is not None and most > left:
            unprobed += 1
            continue
        drawn = list(_score_continuations(number, one, asked, spec, means, seeds[number]))
        samples += drawn
        left = None if left is None else left - sum(s.tokens for s in drawn)
    show(len(answered), len(answered))
    return ProbeResult(answered, tuple(samples), unprobed)


def _sample_answers(
    means: ProbeContext, problems: Sequence[Problem], seeds: Sequence[int]
) -> tuple[list[RolloutTree], RewardTable]:
    with means.sampler.session() as session:
        trees = sample_rollout_trees(means.plan, problems, seeds, session, means.speech)
    return trees, score_rollouts(trees, means.rewards, means.pool)


def _build_probed_answer(
    tree: RolloutTree,
    number: int,
    table: RewardTable,
    stated: tuple[float, ...],
    spec: ProbeSpec,
    means: ProbeContext,
) -> ProbedAnswer:
    place = (number, tree.policy_segments[0])
    turn = tree.segments[place[1]]
    _, ends = means.speech.read(turn.token_ids)
    return ProbedAnswer(
        problem=tree.problem,
        text=turn.text,
        answer=_parse_canonical_answer(turn.text, spec, means.task),
        correct=_is_correct(table, place, means.correct),
        confidences=stated,
        reasoning=find_reasoning(turn, ends, spec.span),
        prompt_ids=tree.token_ids(turn.parent),
        turn_ids=turn.token_ids,
    )


def _is_correct(table: RewardTable, place: tuple[int, int], name: str) -> bool | None:
    raw = table.turns[place][name].raw
    return None if raw is None else raw == 1.0


def _parse_canonical_answer(text: str, spec: ProbeSpec, task: Task) -> str | None:
    """What stands in the answer span, in the one form of all answers that say the same."""
    name = spec.close.strip("</>")
    span = find_spans(text, range(1, len(text) + 1), (name,)).get(name)
    if span is None:
        return None
    if isinstance(task, Canonical):
        return task.canonical(span.text.strip())
    return "".join(span.text.split()).casefold()


def _build_turn_spec(question: ProbeQuestion, spec: ProbeSpec, means: ProbeContext) -> TurnSpec:
    """How a question is continued: as the turn itself is sampled, with what is left of its budget
    of tokens; or only to the answer's end."""
    own = means.plan.levels[0].turn
    if not question.forced:
        left = max(1, own.max_new_tokens - len(question.turn_ids))
        return own.model_copy(update={"max_new_tokens": left})
    return own.model_copy(update={"max_new_tokens": spec.max_new_tokens, "stop": (spec.close,)})


def _get_token_budget(question: ProbeQuestion, spec: ProbeSpec, means: ProbeContext) -> int:
    return _build_turn_spec(question, spec, means).max_new_tokens


@dataclass(frozen=True, slots=True)
class _ProbeContinuation:
    """A continuation before it is scored."""

    seed: int
    response: AssembledResponse
    wrapped: bool


def _score_continuations(
    number: int,
    answered: ProbedAnswer,
    asked: Sequence[ProbeQuestion],
    spec: ProbeSpec,
    means: ProbeContext,
    seed: int,
) -> Iterator[ProbeSample]:
    """Samples every question's continuations and scores them; those of one question are a group."""
    drawn: list[tuple[ProbeQuestion, list[_ProbeContinuation]]] = []
    for forced in (True, False):
        those = [q for q in asked if q.forced is forced]
        if those:
            drawn += zip(
                those, _sample_continuations(those, answered, spec, means, seed), strict=True
            )
    level = means.plan.levels[0]
    trees = [
        build_response_tree(
            answered.problem, answered.prompt_ids, level, [one.response for one in group]
        )
        for _, group in drawn
    ]
    table = score_rollouts(trees, means.rewards, means.pool)
    for tree, (question, group) in enumerate(drawn):
        for segment, one in enumerate(group, start=1):
            said = _parse_canonical_answer(one.response.text, spec, means.task)
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
                correct=_is_correct(table, (tree, segment), means.correct),
                same=None if answered.answer is None else said == answered.answer,
            )


def _sample_continuations(
    asked: Sequence[ProbeQuestion],
    answered: ProbedAnswer,
    spec: ProbeSpec,
    means: ProbeContext,
    seed: int,
) -> list[list[_ProbeContinuation]]:
    """Every question's continuations, its context read once."""
    requests = [
        CompletionRequest(
            (*answered.prompt_ids, *question.turn_ids),
            None,
            tuple(
                derive_seed(seed, question.scheme, question.point.number, i)
                for i in range(spec.samples)
            ),
        )
        for question in asked
    ]
    turns = [_build_turn_spec(question, spec, means) for question in asked]
    # Sampled together with the largest budget among them, and then held each to its own.
    with means.sampler.session() as session:
        groups = session.generate(requests, max(turns, key=lambda turn: turn.max_new_tokens))
    return [
        [
            _build_drawn_response(
                question,
                own,
                truncate_completion(completion, turn.max_new_tokens),
                spec,
                means.speech,
            )
            for own, completion in zip(request.seeds, group, strict=True)
        ]
        for question, turn, request, group in zip(asked, turns, requests, groups, strict=True)
    ]


def _build_drawn_response(
    question: ProbeQuestion,
    seed: int,
    completion: Completion,
    spec: ProbeSpec,
    speech: ProbeDialogue,
) -> _ProbeContinuation:
    """A response, read as one text: apart, its two parts may decode to something else."""
    ids = (*question.turn_ids, *completion.token_ids)
    whole, ends = speech.read(ids)
    given = ends[len(question.turn_ids) - 1]
    text, wrapped = close_forced_answer(question, whole, given, spec)
    reason = "stop" if question.forced else completion.finish_reason
    return _ProbeContinuation(seed, AssembledResponse(ids, text, reason), wrapped)
