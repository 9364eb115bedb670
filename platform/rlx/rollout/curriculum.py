"""Curricula by measured success: problems that teach little are drawn less."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlx.plugin import Problem
from rlx.seeding import derive_seed
from rlx.spec import CurriculumRule

__all__ = ["Curriculum", "compute_draw_probability"]


def compute_draw_probability(success: float, floor: float) -> float:
    """P = floor + (1 - floor) · 4 p (1 - p): 1 for problems solved half of the time, `floor` for
    those that are always or never solved, whose groups have no signal.

    Reference:
        Foster and Foerster, arXiv 2502.12272: p (1 - p), the variance of success, as learnability.
    """
    return floor + (1 - floor) * 4 * success * (1 - success)


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Decides which problems are drawn.

    Attributes:
        rule: what counts as the same problem, and how fast measurements are forgotten.
        success: running share of right answers, by key; a key that is not there is unmeasured.
    """

    rule: CurriculumRule
    success: Mapping[str, float]

    def draws(self, number: int, problem: Problem, seed: int) -> bool:
        """Whether problem number `number` is drawn; it depends on the arguments and `success`."""
        known = self.success.get(self._get_key(problem) or "")
        if known is None:
            return True
        chance = derive_seed(seed, "curriculum", number) / 2**63
        return chance < compute_draw_probability(known, self.rule.floor)

    def measure(self, found: Iterable[tuple[Problem, float]]) -> dict[str, float]:
        """Returns `success` after a step: p ← p + rate · (measured - p), or the first measurement.

        Args:
            found: problems of the step, each with its share of right answers.
        """
        shares: dict[str, list[float]] = {}
        for problem, share in found:
            if (key := self._get_key(problem)) is not None:
                shares.setdefault(key, []).append(share)
        success = dict(self.success)
        for key, values in shares.items():
            measured = sum(values) / len(values)
            before = success.get(key, measured)
            success[key] = before + self.rule.rate * (measured - before)
        return success

    def _get_key(self, problem: Problem) -> str | None:
        """What is measured together; None for a problem without a stratum."""
        if self.rule.by == "problem":
            return f"problem/{problem.id}"
        return f"stratum/{problem.stratum}" if problem.stratum else None
