"""Monte-Carlo values of the states that a response passes through, for VinePPO.

A state is a response cut between two of its steps. From each, continuations are sampled as the turn
itself is, and scored by the experiment's own rewards; the value is their mean score.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.errors import RewardError
from rlx.plugin import Problem
from rlx.probe.cuts import Reasoning, cut_points
from rlx.probe.engine import ProbeContext
from rlx.probe.responses import AssembledResponse, build_response_tree, truncate_completion
from rlx.reward import RewardTable, score_rollouts
from rlx.rollout import Completion, CompletionRequest, RolloutTree
from rlx.seeding import derive_seed
from rlx.spec import Cut

__all__ = ["StateValues", "ValuedResponse", "build_probe_response", "state_values"]


@dataclass(frozen=True, slots=True)
class ValuedResponse:
    """A sampled response whose states are valued.

    Attributes:
        problem: what was asked.
        prompt_ids: tokens before it.
        whole: all of it as one reasoning.
        seed: of everything that is drawn for it.
    """

    problem: Problem
    prompt_ids: tuple[int, ...]
    whole: Reasoning
    seed: int


@dataclass(frozen=True, slots=True)
class StateValues:
    """What the states of one response are worth.

    Attributes:
        borders: tokens of the response before each state, from 0 to all of them, `S + 1`.
        values: mean score of continuations from each; 0 behind the finished response.
        tokens: sampled.
    """

    borders: tuple[int, ...]
    values: tuple[float, ...]
    tokens: int


def build_probe_response(
    tree: RolloutTree, segment: int, means: ProbeContext, seed: int
) -> ValuedResponse:
    """A turn of a tree, to be cut anywhere."""
    turn = tree.segments[segment]
    text, ends = means.speech.read(turn.token_ids)
    whole = Reasoning(start=0, token_ids=turn.token_ids, text=text, ends=ends)
    return ValuedResponse(tree.problem, tree.token_ids(turn.parent), whole, seed)


def state_values(
    given: Sequence[ValuedResponse], means: ProbeContext, cut: Cut, samples: int
) -> list[StateValues]:
    """Values of every state of every response.

    Args:
        given: sampled responses.
        means: with what; `means.plan.levels[0]` says how continuations are sampled.
        cut: where steps end.
        samples: continuations per state.
    """
    borders = [tuple(p.tokens for p in cut_points(r.whole, cut)) for r in given]
    # The last border is the end, where nothing follows.
    states = [(n, s, b) for n, cuts in enumerate(borders) for s, b in enumerate(cuts[:-1])]
    drawn = _sample_state_continuations(given, states, means, samples)
    trees = [
        _build_continuation_tree(given[n], b, group, means)
        for (n, _, b), group in zip(states, drawn, strict=True)
    ]
    table = score_rollouts(trees, means.rewards, means.pool)
    found: list[list[float]] = [[] for _ in given]
    spent = [0] * len(given)
    for at, ((n, _, _), group) in enumerate(zip(states, drawn, strict=True)):
        found[n].append(_compute_mean_score(table, at, len(group)))
        spent[n] += sum(len(c.token_ids) for c in group)
    return [
        StateValues(cuts, (*values, 0.0), tokens)
        for cuts, values, tokens in zip(borders, found, spent, strict=True)
    ]


def _sample_state_continuations(
    given: Sequence[ValuedResponse],
    states: Sequence[tuple[int, int, int]],
    means: ProbeContext,
    samples: int,
) -> list[tuple[Completion, ...]]:
    """Continuations from every state, each with what is left of the turn's budget of tokens.

    The k-th states of all responses are sampled together, with the largest budget among them, and
    then held to their own: what comes later cannot change what came before.
    """
    turn = means.plan.levels[0].turn
    drawn: dict[int, tuple[Completion, ...]] = {}
    for number in sorted({s for _, s, _ in states}):
        those = [at for at, (_, s, _) in enumerate(states) if s == number]
        room = max(1, turn.max_new_tokens - min(states[at][2] for at in those))
        sampling = turn.model_copy(update={"max_new_tokens": room})
        requests = [
            _build_state_request(given[states[at][0]], *states[at][1:], samples) for at in those
        ]
        with means.sampler.session() as session:
            groups = session.generate(requests, sampling)
        for at, group in zip(those, groups, strict=True):
            own = turn.max_new_tokens - states[at][2]
            drawn[at] = tuple(truncate_completion(completion, own) for completion in group)
    return [drawn[at] for at in range(len(states))]


def _build_state_request(
    response: ValuedResponse, state: int, border: int, samples: int
) -> CompletionRequest:
    seeds = tuple(derive_seed(response.seed, "state", state, i) for i in range(samples))
    context = (*response.prompt_ids, *response.whole.token_ids[:border])
    return CompletionRequest(context, None, seeds)


def _build_continuation_tree(
    response: ValuedResponse, border: int, group: Sequence[Completion], means: ProbeContext
) -> RolloutTree:
    """The continuations from one state as whole responses."""
    kept = response.whole.token_ids[:border]
    written = [
        AssembledResponse(ids := (*kept, *c.token_ids), means.speech.read(ids)[0], c.finish_reason)
        for c in group
    ]
    return build_response_tree(response.problem, response.prompt_ids, means.plan.levels[0], written)


def _compute_mean_score(table: RewardTable, tree: int, count: int) -> float:
    """Mean score of a tree's responses; those that could not be scored are left out.

    Raises:
        RewardError: none of them could: a state of unknown worth is not one that is worth nothing.
    """
    scores = [table.total_score(tree, (segment,)) for segment in range(1, count + 1)]
    known = [one for one in scores if one is not None]
    if not known:
        raise RewardError("no continuation from some state of a response could be scored")
    return sum(known) / len(known)
