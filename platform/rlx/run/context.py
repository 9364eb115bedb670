"""What a rank carries through a run: its objects, the state between steps, a stop request, and its
CPU time by part of the work.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from rlx.kl import KlCoefficient, mean_kl
from rlx.spec import CreditSpec, ExperimentSpec
from rlx.step import TrainBatch

if TYPE_CHECKING:
    from rlx.home import RunFolder
    from rlx.learner import Critic, Learner, Ranks, ReferencePolicy
    from rlx.model import Policy
    from rlx.progress import ProgressFile
    from rlx.record import Recorder
    from rlx.reward import RewardPool
    from rlx.sampler import SamplingEngine


Part = Literal["sample", "score", "learn", "evaluate"]


class CpuAccount:
    """Adds up the CPU seconds of a rank by part of its work; what is in no part is the rest.

    Args:
        read: returns CPU seconds so far, of this process and of those that work for it.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._seconds = dict.fromkeys(get_args(Part), 0.0)
        self._since, self._measured = read(), 0.0
        self._is_measuring = False

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Counts what is used within the block as `part`; a block inside another is part of it."""
        if self._is_measuring:
            yield
            return
        self._is_measuring, began = True, self._read()
        try:
            yield
        finally:
            self._is_measuring, used = False, self._read() - began
            self._seconds[part] += used
            self._measured += used

    def take(self, *parts: Part) -> dict[str, float]:
        """Metrics of parts, since each was taken last."""
        taken = {f"perf/cpu_{part}_s": self._seconds[part] for part in parts}
        self._seconds |= dict.fromkeys(parts, 0.0)
        return taken

    def take_rest(self) -> dict[str, float]:
        """The metric of what was in no part since the last call."""
        now = self._read()
        rest = now - self._since - self._measured
        self._since, self._measured = now, 0.0
        return {"perf/cpu_rest_s": rest}


@dataclass(frozen=True, slots=True)
class RunContext:
    """The objects of one rank that live as long as its run.

    Attributes:
        critic: None if no estimator of the run needs values.
        reference: None if the run uses no KL divergence from a reference policy.
        recorder: None except on rank 0.
        cpu: CPU seconds by part of the work.
    """

    spec: ExperimentSpec
    folder: RunFolder
    ranks: Ranks
    policy: Policy
    sampler: SamplingEngine
    learner: Learner
    critic: Critic | None
    reference: ReferencePolicy | None
    pool: RewardPool
    recorder: Recorder | None
    progress: ProgressFile
    cpu: CpuAccount


@dataclass(frozen=True, slots=True)
class ControllerState:
    """State of controllers and estimators; recorded with every step.

    Attributes:
        kl: β, the coefficient of the KL penalty in the reward.
        states: state of each estimator, such as a running scale, by the estimator's name.
        critic: number of steps in which the critic has been trained.
        settings: the settings with which `kl` started.
    """

    kl: KlCoefficient
    states: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    critic: int = 0
    settings: tuple[object, ...] = ()

    @staticmethod
    def begin(credit: CreditSpec, before: ControllerState | None) -> ControllerState:
        """The initial state of a phase: the state so far, with a new β if its settings change."""
        settings = (credit.kl_coef, credit.kl_adaptive)
        if before is not None and before.settings == settings:
            return before
        kl = KlCoefficient(beta=credit.kl_coef)
        if (adaptive := credit.kl_adaptive) is not None:
            kl = replace(kl, target=adaptive.target, horizon=adaptive.horizon)
        return replace(before or ControllerState(kl), kl=kl, settings=settings)

    @staticmethod
    def resume(
        credit: CreditSpec,
        beta: float | None,
        states: Mapping[str, Mapping[str, float]],
        critic: int,
    ) -> ControllerState:
        """The state from a checkpoint of this phase; a fixed β comes from the settings instead."""
        begun = replace(ControllerState.begin(credit, None), states=states, critic=critic)
        if beta is None or begun.kl.target is None:
            return begun
        return replace(begun, kl=replace(begun.kl, beta=beta))

    @property
    def adaptive_beta(self) -> float | None:
        """The current β if it is adaptive; None if it is fixed."""
        return None if self.kl.target is None else self.kl.beta

    def after(
        self, train: TrainBatch, spec: ExperimentSpec, *, with_critic: bool
    ) -> ControllerState:
        """The state after a step."""
        states = {**self.states, spec.estimator.plugin: train.state} if train.state else self.states
        controllers = replace(self, states=states, critic=self.critic + with_critic)
        if train.kl is None or not spec.credit.use_kl_in_reward or not train.mask.any():
            return controllers
        measured = float(mean_kl(train.kl, train.mask))
        return replace(controllers, kl=self.kl.update(measured, len(train.batch.rows)))


class RunStopped(Exception):
    """The run was stopped, after writing a checkpoint to resume from."""


class StopRequest:
    """Listens for SIGTERM, which ends the process at once outside `defer_exit`."""

    def __init__(self) -> None:
        self._honoured = False
        self.requested = False
        signal.signal(signal.SIGTERM, self._handle_signal)

    def _handle_signal(self, *_: object) -> None:
        self.requested = True
        if not self._honoured:
            os._exit(128 + signal.SIGTERM)

    @contextmanager
    def defer_exit(self) -> Iterator[None]:
        """Within this context, training checks `requested` after every step."""
        self._honoured = True
        try:
            yield
        finally:
            self._honoured = False
