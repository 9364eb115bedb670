"""The experiment: what one YAML file says, complete."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Self

from pydantic import Field, model_validator
from pydantic_core import to_json

from rlx.spec.base import Contradiction, Problem, Strict
from rlx.spec.loss import LossSpec
from rlx.spec.model import ModelSpec
from rlx.spec.reward import PluginUse, RewardsSpec
from rlx.spec.rollout import RolloutSpec, Single, TwoTurn
from rlx.spec.training import (
    EvaluationSpec,
    OptimizerSpec,
    PhaseSpec,
    RunnerSpec,
    SamplerSpec,
    TrackingSpec,
    TransformersSampler,
)

__all__ = ["EstimatorUse", "ExperimentSpec", "MaskUse"]

_NOT_IN_DIGEST = ("name", "seed", "runner", "tracking")
_FIXED_IN_PHASES = (
    "name",
    "seed",
    "model",
    "runner",
    "sampler",
    "tracking",
    "evaluation",
    "phases",
)


class EstimatorUse(PluginUse):
    """An advantage estimator by `name`, with its own options beside it."""

    plugin: str = Field("grpo", alias="name")


class MaskUse(PluginUse):
    """A mask strategy by `strategy`, with its own options beside it."""

    plugin: str = Field("turn_spans", alias="strategy")


class ExperimentSpec(Strict):
    """One experiment. Equal digests are equal experiments; a run is a digest and a seed."""

    name: str = Field(min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, lt=2**31)
    model: ModelSpec
    task: PluginUse
    rollout: RolloutSpec = Single()
    rewards: RewardsSpec
    mask: MaskUse = MaskUse()
    estimator: EstimatorUse = EstimatorUse()
    loss: LossSpec = LossSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    phases: tuple[PhaseSpec, ...] = Field(min_length=1)
    runner: RunnerSpec = RunnerSpec()
    sampler: SamplerSpec = TransformersSampler()
    evaluation: EvaluationSpec = EvaluationSpec()
    tracking: TrackingSpec = TrackingSpec()

    @model_validator(mode="after")
    def _names_point_somewhere(self) -> Self:
        problems = [*self._reward_problems(), *self._span_problems()]
        if problems:
            raise Contradiction(*problems)
        return self

    def _reward_problems(self) -> Iterator[Problem]:
        turns = self.rollout.turns
        rewards = self.rewards.turn
        names = tuple(rewards)
        if not rewards and not self.rewards.global_:
            message = "rewards is empty: name at least one under rewards.turn"
            yield Problem(("rewards",), message)
            return
        for name, reward in rewards.items():
            if reward.turn not in turns:
                message = (
                    f"rewards.turn.{name}.turn is {reward.turn!r}, but schedule "
                    f"{self.rollout.schedule!r} has only {', '.join(turns)}"
                )
                yield Problem(("rewards", "turn", name, "turn"), message, turns)
            if reward.of is not None and reward.of not in rewards:
                message = (
                    f"rewards.turn.{name}.of is {reward.of!r}, which is not a turn reward; "
                    f"there are: {', '.join(rewards)}"
                )
                yield Problem(("rewards", "turn", name, "of"), message, names)
        if self.evaluation.correct not in rewards:
            message = (
                f"evaluation.correct is {self.evaluation.correct!r}, which is not a turn reward; "
                f"there are: {', '.join(rewards) or 'none'}"
            )
            yield Problem(("evaluation", "correct"), message, names)

    def _span_problems(self) -> Iterator[Problem]:
        bonus = self.loss.entropy
        spans = [s for t in self.rollout.turns for s in getattr(self.rollout, t).spans]
        if bonus is not None and bonus.span not in spans:
            message = (
                f"loss.entropy.span is {bonus.span!r}, but the turns declare "
                f"{', '.join(spans) or 'no spans'}"
            )
            yield Problem(("loss", "entropy", "span"), message, tuple(spans))

    @model_validator(mode="after")
    def _phases_resolve(self) -> Self:
        problems: list[Problem] = []
        names: set[str] = set()
        for number, phase in enumerate(self.phases):
            if phase.name in names:
                message = f"phases.{number}.name is {phase.name!r}, as an earlier phase is called"
                problems.append(Problem(("phases", number, "name"), message))
            names.add(phase.name)
            if phase.set:
                problems += self._phase_problems(number, phase)
        if problems:
            raise Contradiction(*problems)
        return self

    def _phase_problems(self, number: int, phase: PhaseSpec) -> Iterator[Problem]:
        tree: dict[str, Any] = {}
        try:
            tree = self._laid(phase)
            ExperimentSpec.model_validate_json(to_json(tree), strict=True)
        except ValueError as error:
            message = f"phases.{number}.set does not fit: {error}"
            yield Problem(("phases", number), message, cause=error, data=tree)

    @property
    def steps(self) -> int:
        """Training steps of all phases together."""
        return sum(phase.steps for phase in self.phases)

    def in_phase(self, phase: PhaseSpec) -> "ExperimentSpec":
        """Returns the experiment as it stands during `phase`.

        Choosing another schedule drops the keys that only the former one has, and with them the
        rewards and the entropy bonus of turns that are not sampled.

        Raises:
            ValueError: a path names nothing, or something that is fixed for the whole run.
        """
        return ExperimentSpec.model_validate_json(to_json(self._laid(phase)), strict=True)

    def _laid(self, phase: PhaseSpec) -> dict[str, Any]:
        """The resolved spec with the phase's values laid over it, not yet checked."""
        tree = self.resolved()
        problems = [p for path, value in phase.set.items() if (p := _lay(tree, path, value))]
        if problems:
            raise Contradiction(*problems)
        tree["phases"] = [{"name": phase.name, "steps": phase.steps}]
        kind = _SCHEDULES.get(str(phase.set.get("rollout.schedule")))
        if kind is not None and not isinstance(self.rollout, kind):
            _keep_turns_of(kind, tree)
        return tree

    def resolved(self) -> dict[str, Any]:
        """The whole spec, defaults included, as plain JSON values under their YAML keys."""
        return self.model_dump(mode="json", by_alias=True)

    @property
    def digest(self) -> str:
        """16 hex digits over everything that decides results, except the seed."""
        said = {k: v for k, v in self.resolved().items() if k not in _NOT_IN_DIGEST}
        text = json.dumps(said, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_SCHEDULES: dict[str, type[Single | TwoTurn]] = {"single": Single, "two_turn": TwoTurn}


def _lay(tree: dict[str, Any], path: str, value: Any) -> Problem | None:
    """Puts one of a phase's values into the resolved tree; returns why it cannot go there."""
    head, *rest = path.split(".")
    place = ("set", path)
    if head in _FIXED_IN_PHASES:
        return Problem(place, f"{path!r} cannot differ between phases")
    if head not in ExperimentSpec.model_fields:
        return Problem(place, f"there is no {path!r}", tuple(ExperimentSpec.model_fields))
    node = tree
    for key in (head, *rest)[:-1]:
        below = node.get(key)
        if not isinstance(below, dict):
            return Problem(place, f"there is no {path!r}")
        node = below
    node[(head, *rest)[-1]] = value
    return None


def _keep_turns_of(kind: type[Single | TwoTurn], tree: dict[str, Any]) -> None:
    """Drops what only the former schedule has; leaves what is malformed to validation."""
    if not all(isinstance(tree[part], dict) for part in ("rollout", "rewards", "loss")):
        return
    tree["rollout"] = {k: v for k, v in tree["rollout"].items() if k in kind.model_fields}
    rewards = tree["rewards"].get("turn")
    if isinstance(rewards, dict):
        tree["rewards"]["turn"] = {
            name: reward
            for name, reward in rewards.items()
            if not isinstance(reward, dict) or reward.get("turn") in kind.turns
        }
    turns = [t for turn in kind.turns if isinstance(t := tree["rollout"].get(turn), dict)]
    spans = [span for turn in turns for span in turn.get("spans") or ()]
    bonus = tree["loss"].get("entropy")
    if isinstance(bonus, dict) and bonus.get("span") not in spans:
        tree["loss"]["entropy"] = None
