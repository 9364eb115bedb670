"""A process in which the policy may stop early, small enough to enumerate.

In each of three turns the policy writes `search` or `answer`; in the first one it may `think`
before. Answering ends the rollout, searching in the last turn too. Every search is paid, and an
answer is right if enough was found and not too much. The policy is a softmax over the choices of
every state, in float64; a state is all that was written so far. There are eight rollouts, of one to
four tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from math import factorial, prod

import torch
from torch import Tensor

from rlx.plugin import Problem
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import NO_PARENT, RolloutTree, Segment

TOKENS = ("prompt", "think", "search", "answer", "result")
TURNS = 3

Turn = tuple[str, ...]
History = tuple[Turn, ...]

LOGITS: dict[History, tuple[float, ...]] = {
    ((),): (0.3, 0.6, -0.2),
    (("think",),): (0.4, -0.5),
    (("search",), ()): (-0.3, 0.2),
    (("search",), ("search",), ()): (-0.7, 0.5),
    (("think", "search"), ()): (0.1, 0.6),
    (("think", "search"), ("search",), ()): (-0.4, 0.8),
}
"""The policy: logits of the choices in every state, in the order of `list_choices`. The last turn
of a state is what was written of it so far."""


def list_choices(state: History) -> Turn:
    """The tokens that the policy may write in a state."""
    return ("think", "search", "answer") if state == ((),) else ("search", "answer")


def list_rollouts(state: History = ((),)) -> Iterator[History]:
    """Yields every rollout that goes on from a state."""
    *before, turn = state
    for token in list_choices(state):
        turns = (*before, (*turn, token))
        if token == "think":
            yield from list_rollouts(turns)
        elif token == "search" and len(turns) < TURNS:
            yield from list_rollouts((*turns, ()))
        else:
            yield turns


def list_states(rollout: History) -> list[tuple[History, int]]:
    """For every token of a rollout, the state it was written in and its number there."""
    states = []
    for k, turn in enumerate(rollout):
        for t, token in enumerate(turn):
            state = (*rollout[:k], turn[:t])
            states.append((state, list_choices(state).index(token)))
    return states


def score_turn(turn: Turn) -> float:
    """Reward of a turn: 1/4 for a search."""
    return 0.25 if turn[-1] == "search" else 0.0


def score_outcome(rollout: History) -> float:
    """Reward of a rollout: 1 for an answer after one or two results, a thought counting as one."""
    found = sum(len(turn) for turn in rollout if turn[-1] == "search")
    return float(rollout[-1][-1] == "answer" and 1 <= found <= 2)


@dataclass(frozen=True)
class Process:
    """All rollouts of a policy, as tensors in float64.

    Letters: N rollouts, L tokens of the longest, P logits.

    Attributes:
        logits: `[P]`.
    """

    logits: Tensor

    @cached_property
    def rollouts(self) -> tuple[History, ...]:
        """The N rollouts."""
        return tuple(list_rollouts())

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each rollout."""
        return [len(list_states(rollout)) for rollout in self.rollouts]

    def compute_logprobs(self, logits: Tensor) -> list[Tensor]:
        """Log-probabilities of the tokens of each rollout, differentiable in `[P]` logits."""
        sizes = [len(list_choices(state)) for state in LOGITS]
        rows = dict(zip(LOGITS, (x.log_softmax(0) for x in logits.split(sizes)), strict=True))
        return [
            torch.stack([rows[state][choice] for state, choice in list_states(rollout)])
            for rollout in self.rollouts
        ]

    def compute_expected_return(self, logits: Tensor, returns: Tensor) -> Tensor:
        """`[]` Σₙ p(n) R(n), differentiable in the logits."""
        chances = torch.stack([x.sum() for x in self.compute_logprobs(logits)]).exp()
        return (chances * returns).sum()

    @cached_property
    def logprobs(self) -> list[Tensor]:
        """Log-probabilities of the tokens of each rollout."""
        return self.compute_logprobs(self.logits)

    @cached_property
    def probabilities(self) -> Tensor:
        """`[N]` of the rollouts."""
        return torch.stack([x.sum() for x in self.logprobs]).exp()

    @cached_property
    def scores(self) -> Tensor:
        """`[N, L, P]` ∇ log π of every token: 1 at its own logit, minus π of its state."""
        scores = self.logits.new_zeros(len(self.rollouts), max(self.lengths), len(self.logits))
        sizes = [len(list_choices(state)) for state in LOGITS]
        starts = dict(zip(LOGITS, torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
        for n, rollout in enumerate(self.rollouts):
            for t, (state, choice) in enumerate(list_states(rollout)):
                here = slice(starts[state], starts[state] + len(list_choices(state)))
                scores[n, t, here] -= self.logits[here].softmax(0)
                scores[n, t, starts[state] + choice] += 1
        return scores

    @cached_property
    def returns(self) -> dict[str, Tensor]:
        """`[N]` what a rollout earns: its turns summed or averaged, plus its outcome."""
        turns = [[score_turn(turn) for turn in rollout] for rollout in self.rollouts]
        outcomes = self.logits.new_tensor([score_outcome(rollout) for rollout in self.rollouts])
        total = self.logits.new_tensor([sum(each) for each in turns])
        counts = self.logits.new_tensor([len(each) for each in turns])
        return {"sum": total + outcomes, "mean": total / counts + outcomes}

    def compute_exact_gradient(self, returns: Tensor) -> Tensor:
        """`[P]` ∇ Σₙ p(n) R(n) = Σₙ p(n) R(n) Σₜ ∇ log π."""
        return torch.einsum("n,nlp->p", self.probabilities * returns, self.scores)

    def compute_values(self, token_rewards: Sequence[Tensor]) -> list[Tensor]:
        """For every token, the expected rewards from it on, given what was written before it.

        Args:
            token_rewards: of the tokens of each rollout.
        """
        sums: dict[History, Tensor] = {}
        chances: dict[History, Tensor] = {}
        for n, rollout in enumerate(self.rollouts):
            to_go = token_rewards[n].flip(0).cumsum(0).flip(0)
            for (state, _), reward in zip(list_states(rollout), to_go, strict=True):
                sums[state] = sums.get(state, 0) + self.probabilities[n] * reward
                chances[state] = chances.get(state, 0) + self.probabilities[n]
        return [
            torch.stack([sums[state] / chances[state] for state, _ in list_states(rollout)])
            for rollout in self.rollouts
        ]

    @cached_property
    def collisions(self) -> list[Tensor]:
        """For every token, Σ π² over the choices of its state."""
        squares = {s: torch.tensor(x).double().softmax(0).square().sum() for s, x in LOGITS.items()}
        return [torch.stack([squares[s] for s, _ in list_states(r)]) for r in self.rollouts]

    @property
    def greedy(self) -> int:
        """Number of the rollout in which every token is the likeliest."""
        return next(
            n
            for n, rollout in enumerate(self.rollouts)
            if all(max(LOGITS[s]) == LOGITS[s][choice] for s, choice in list_states(rollout))
        )


def build_process() -> Process:
    """The process with the policy of `LOGITS`."""
    return Process(torch.tensor([x for row in LOGITS.values() for x in row], dtype=torch.float64))


def list_groups(process: Process, size: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields every multiset of `size` rollouts, with its probability: they sum to 1."""
    chances = process.probabilities.tolist()
    for group in combinations_with_replacement(range(len(chances)), size):
        orders = factorial(size) / prod(factorial(group.count(n)) for n in set(group))
        yield group, orders * prod(chances[n] for n in group)


def grow_tree(process: Process, group: Sequence[int]) -> RolloutTree:
    """The rollouts of a group as the sampler would have grown them below one prompt."""
    segments = [Segment(parent=NO_PARENT, author="prompt", token_ids=(0,), text="prompt")]
    for n in group:
        parent, logprobs = 0, process.logprobs[n].tolist()
        for number, turn in enumerate(process.rollouts[n], start=1):
            if number > 1:
                result = (TOKENS.index("result"),) * (number - 1)
                state = {"state": process.rollouts[n][: number - 1]}
                segments.append(
                    Segment(parent=parent, author="environment", token_ids=result, info=state)
                )
                parent = len(segments) - 1
            own, logprobs = logprobs[: len(turn)], logprobs[len(turn) :]
            segments.append(
                Segment(
                    parent=parent,
                    author="policy",
                    token_ids=tuple(map(TOKENS.index, turn)),
                    turn=number,
                    kind="turn",
                    logprobs=tuple(own),
                    finish_reason="stop",
                    text=" ".join(turn),
                )
            )
            parent = len(segments) - 1
    return RolloutTree(Problem(id="p", prompt="prompt", fields={}), tuple(segments))


def score_trees(trees: Sequence[RolloutTree]) -> RewardTable:
    """The rewards of all turns and rollouts."""
    turns, rollouts = {}, {}
    for number, tree in enumerate(trees):
        parents = {segment.parent for segment in tree.segments}
        for index in tree.policy_segments:
            place, turn = (number, index), tuple(tree.segments[index].text.split())
            turns[place] = {"step": RewardEntry("step", score_turn(turn), 1.0, "scored")}
            if index not in parents:
                path = [tree.segments[i] for i in tree.path(index)]
                rollout = tuple(tuple(s.text.split()) for s in path if s.author == "policy")
                outcome = score_outcome(rollout)
                rollouts[place] = {"outcome": RewardEntry("outcome", outcome, 1.0, "scored")}
    return RewardTable(turns=turns, dropped=frozenset(), faults={}, rollouts=rollouts)
