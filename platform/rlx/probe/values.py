"""Monte-Carlo values of a response's intermediate states, for VinePPO.

A state is a response cut between two of its steps. Continuations are sampled from each state with
the turn's own settings and scored with the experiment's rewards; the value is their mean score.

"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.errors import RewardError
from rlx.plugin import Problem
from rlx.probe.engine import ProbeContext
from rlx.probe.questions import (
    AssembledResponse,
    Reasoning,
    build_response_tree,
    cut_points,
    sample_continuations,
)
from rlx.reward import RewardTable, score_rollouts
from rlx.rollout import Completion, CompletionRequest, RolloutTree
from rlx.seeding import derive_seed
from rlx.spec import Cut


@dataclass(frozen=True, slots=True)
class ValuedResponse:
    """A sampled response whose states are valued.

    Attributes:
        problem: the problem.
        prompt_ids: tokens before the response.
        whole: the whole response, as one reasoning.
        seed: seed of everything sampled for it.
    """

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
    """Wraps a turn of a tree as a response whose states can be valued."""
    turn = tree.segments[segment]
    text, ends = context.speech.read(turn.token_ids)
    whole = Reasoning(start=0, token_ids=turn.token_ids, text=text, ends=ends)
    return ValuedResponse(tree.problem, tree.token_ids(turn.parent), whole, seed)


def state_values(
    responses: Sequence[ValuedResponse], context: ProbeContext, cut: Cut, samples: int
) -> list[StateValues]:
    """Estimates the value of every state of every response.

    Args:
        responses: sampled responses.
        context: sampler and rewards; `context.plan.levels[0]` has the sampling settings.
        cut: where steps end.
        samples: continuations per state.

    Raises:
        RewardError: no continuation of some state could be scored.
    """
    borders = [tuple(p.tokens for p in cut_points(r.whole, cut)) for r in responses]
    # The last border is the end of the response, which is not continued.
    states = [(n, s, b) for n, cuts in enumerate(borders) for s, b in enumerate(cuts[:-1])]
    drawn = _sample_state_continuations(responses, states, context, samples)
    trees = [
        _build_continuation_tree(responses[n], b, group, context)
        for (n, _, b), group in zip(states, drawn, strict=True)
    ]
    table = score_rollouts(trees, context.rewards, context.pool)
    found: list[list[float]] = [[] for _ in responses]
    spent = [0] * len(responses)
    for at, ((n, _, _), group) in enumerate(zip(states, drawn, strict=True)):
        found[n].append(_compute_mean_score(table, at, len(group)))
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
    """Samples continuations from every state, each with the turn's remaining token budget.

    The k-th states of all responses are sampled together, whose budgets are alike.
    """
    turn = context.plan.levels[0].turn
    drawn: dict[int, list[Completion]] = {}
    for number in sorted({s for _, s, _ in states}):
        those = [at for at, (_, s, _) in enumerate(states) if s == number]
        requests = [
            _build_state_request(responses[states[at][0]], *states[at][1:], samples) for at in those
        ]
        rooms = [turn.max_new_tokens - states[at][2] for at in those]
        groups = sample_continuations(context.sampler, requests, turn, rooms)
        drawn |= dict(zip(those, groups, strict=True))
    return [drawn[at] for at in range(len(states))]


def _build_state_request(
    response: ValuedResponse, state: int, border: int, samples: int
) -> CompletionRequest:
    seeds = tuple(derive_seed(response.seed, "state", state, i) for i in range(samples))
    context = (*response.prompt_ids, *response.whole.token_ids[:border])
    return CompletionRequest(context, None, seeds, is_last=True)


def _build_continuation_tree(
    response: ValuedResponse, border: int, group: Sequence[Completion], context: ProbeContext
) -> RolloutTree:
    """Builds a tree of whole responses from the continuations of one state."""
    kept = response.whole.token_ids[:border]
    written = [
        AssembledResponse(
            ids := (*kept, *c.token_ids), context.speech.read(ids)[0], c.finish_reason
        )
        for c in group
    ]
    return build_response_tree(
        response.problem, response.prompt_ids, context.plan.levels[0], written
    )


def _compute_mean_score(table: RewardTable, tree: int, count: int) -> float:
    """Mean score of a tree's responses; unscored responses are left out.

    Raises:
        RewardError: no response was scored; an unknown value must not be taken for 0.
    """
    scores = [table.total_score(tree, (segment,)) for segment in range(1, count + 1)]
    known = [one for one in scores if one is not None]
    if not known:
        raise RewardError("no continuation from some state of a response could be scored")
    return sum(known) / len(known)
