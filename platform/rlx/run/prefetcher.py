"""Samples the next step's rollouts while the current step trains: one step off-policy.

A thread samples and scores this rank's share without communicating with other ranks: only the main
thread runs collectives, in the same order on every rank. Meanwhile the sampler keeps the weights
from before the update, and anything else that needs it waits (`finish`). The rollouts therefore
depend on the step number, never on timing.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from rlx.recipe import Recipe
from rlx.run.collect import RolloutShare, StepRollouts, collect_rollouts, sample_first_share
from rlx.run.run_context import RunContext
from rlx.run.weight_sync import synchronize_sampler

__all__ = ["Prefetcher"]


@dataclass(frozen=True, slots=True)
class _PendingShare:
    """A share that the thread is sampling, and the arguments of `collect_rollouts` for its step."""

    share: Future[RolloutShare]
    recipe: Recipe
    cursor: int
    after: int
    success: Mapping[str, float]


class Prefetcher:
    """Holds at most one step's rollouts, in flight or ready; a context manager.

    Args:
        device: the sampler's device.
    """

    def __init__(self, device: torch.device) -> None:
        def set_thread_device() -> None:
            if device.type == "cuda":  # the current device is per thread
                torch.cuda.set_device(device)

        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="ahead", initializer=set_thread_device
        )
        self._growing: _PendingShare | None = None
        self._ready: StepRollouts | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown()

    @property
    def uses_sampler(self) -> bool:
        """Whether the thread is using the sampler; nothing else may use it until `finish`."""
        return self._growing is not None

    @property
    def ready(self) -> StepRollouts | None:
        """Finished rollouts that have not been taken; after `finish`, none are in flight."""
        return self._ready

    def begin(
        self,
        context: RunContext,
        recipe: Recipe,
        cursor: int,
        after: int,
        success: Mapping[str, float],
    ) -> None:
        """Starts sampling with the sampler's current weights, those after step `after`, by the
        success that is measured so far."""
        share = self._thread.submit(sample_first_share, context, recipe, cursor, success)
        self._growing = _PendingShare(share, recipe, cursor, after, success)

    def finish(self, context: RunContext) -> None:
        """Waits for the rollouts in flight, then loads the updated weights into the sampler.

        Every rank calls it. Work that the thread leaves, such as resampling rollouts without
        signal, is done here, with the weights that sampled the rest.
        """
        growing = self._growing
        if growing is None:
            return
        context.progress.show_activity("generation")
        share = growing.share.result()
        self._ready = collect_rollouts(
            context, growing.recipe, growing.cursor, growing.after, growing.success, share
        )
        self._growing = None
        synchronize_sampler(context)

    def restore_rollouts(self, rollouts: StepRollouts) -> None:
        """Restores the prefetched rollouts from a checkpoint."""
        self._ready = rollouts

    def take(self, context: RunContext) -> StepRollouts | None:
        """Takes the prefetched rollouts; None if there are none. Every rank calls it."""
        self.finish(context)
        taken, self._ready = self._ready, None
        return taken
