"""Samples the rollouts of later steps while the current step trains: off-policy.

Threads sample and score this rank's share without communicating with other ranks: only the main
thread runs collectives, in the same order on every rank.

One step ahead, the sampler keeps the weights from before the update, and anything else that needs
it waits (`free_sampler`). The rollouts therefore depend on the step number, never on timing.
Further ahead, a pool of servers takes new weights while it samples. The rollouts of a step begin
with the weights of `off_policy_steps` steps before, and no token is older.
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from rlx.recipe import Recipe
from rlx.run.collect import (
    RolloutShare,
    StepRollouts,
    collect_rollouts,
    count_drawn_problems,
    sample_first_share,
)
from rlx.run.run_context import RunContext
from rlx.run.weight_sync import synchronize_sampler

__all__ = ["Prefetcher"]

MOST = 8
"""Steps in flight at most, see `rlx.plugin.Schedule.off_policy_steps`."""


@dataclass(frozen=True, slots=True)
class _PendingShare:
    """A share that a thread is sampling, and the arguments of `collect_rollouts` for its step."""

    share: Future[RolloutShare]
    recipe: Recipe
    cursor: int
    after: int
    success: Mapping[str, float]

    @property
    def keeps_weights(self) -> bool:
        """Whether the sampler must keep its weights until the share is there."""
        return self.recipe.spec.rollout.off_policy_steps < 2


class Prefetcher:
    """Holds the rollouts of later steps, in flight or ready, in their order; a context manager.

    Args:
        device: the sampler's device.
    """

    def __init__(self, device: torch.device) -> None:
        def set_thread_device() -> None:
            if device.type == "cuda":  # the current device is per thread
                torch.cuda.set_device(device)

        self._threads = ThreadPoolExecutor(
            MOST, thread_name_prefix="ahead", initializer=set_thread_device
        )
        self._growing: deque[_PendingShare] = deque()
        self._ready: deque[StepRollouts] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error nobody waits for dialogues: the sampler's end ends them.
        self._threads.shutdown(wait=error is None, cancel_futures=error is not None)

    @property
    def keeps_weights(self) -> bool:
        """Whether the sampler must keep its weights; it is free after `free_sampler`."""
        return any(pending.keeps_weights for pending in self._growing)

    @property
    def ready(self) -> tuple[StepRollouts, ...]:
        """Finished rollouts that have not been taken; after `finish`, none are in flight."""
        return tuple(self._ready)

    def begin(
        self,
        context: RunContext,
        recipe: Recipe,
        cursor: int,
        after: int,
        success: Mapping[str, float],
        most: int,
    ) -> None:
        """Starts sampling the steps that are not yet sampled, with the sampler's current weights.

        Args:
            cursor: number of problems drawn before the first step that is ahead.
            after: the step whose weights the sampler has.
            success: the success that is measured so far.
            most: number of steps that are to be ahead.
        """
        at = cursor + sum(rollouts.drawn for rollouts in self._ready)
        for pending in self._growing:
            at = pending.cursor + count_drawn_problems(
                context, pending.recipe, pending.cursor, pending.success
            )
        while len(self._ready) + len(self._growing) < most:
            share = self._threads.submit(sample_first_share, context, recipe, at, success)
            self._growing.append(_PendingShare(share, recipe, at, after, success))
            if len(self._ready) + len(self._growing) < most:
                at += count_drawn_problems(context, recipe, at, success)

    def finish(self, context: RunContext, after: int) -> None:
        """Waits for all rollouts in flight; every rank calls it.

        Args:
            after: the step that has been trained last.
        """
        while self._growing:
            self._finish_first(context, after)

    def free_sampler(self, context: RunContext, after: int) -> None:
        """Waits for rollouts that need the weights of before step `after`, then loads those of
        after it; every rank calls it."""
        if self.keeps_weights:
            self.finish(context, after)

    def _finish_first(self, context: RunContext, after: int) -> None:
        """Waits for the oldest rollouts in flight, and loads weights that had to wait for it.

        Work that the thread leaves, such as resampling rollouts without signal, is done here, with
        the weights that sampled the rest.
        """
        growing = self._growing[0]
        context.progress.show_activity("generation")
        share = growing.share.result()
        self._ready.append(
            collect_rollouts(
                context, growing.recipe, growing.cursor, growing.after, growing.success, share
            )
        )
        self._growing.popleft()
        if growing.keeps_weights:
            synchronize_sampler(context, after)

    def restore_rollouts(self, rollouts: tuple[StepRollouts, ...]) -> None:
        """Restores the rollouts of later steps from a checkpoint."""
        self._ready.extend(rollouts)

    def take(self, context: RunContext, after: int) -> StepRollouts | None:
        """Takes the next step's rollouts; None if they are not sampled ahead. Every rank calls it.

        Args:
            after: the step that has been trained last.
        """
        if not self._ready and self._growing:
            self._finish_first(context, after)
        return self._ready.popleft() if self._ready else None
