"""Rollouts of the next step, sampled while the step in hand learns: one step off-policy.

A thread samples and scores this rank's share and speaks to no other rank: collectives come from the
main thread alone, in the same order on every rank. Meanwhile the sampler keeps the weights from
before the update, and whatever else needs it waits (`finish`). So what is sampled depends on the
number of a step and never on time.
"""

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
    """A share that the thread is at, and what it is the first part of."""

    share: Future[RolloutShare]
    recipe: Recipe
    cursor: int
    after: int


class Prefetcher:
    """At most one step's rollouts, in flight or ready; a context manager.

    Args:
        device: where the sampler is.
    """

    def __init__(self, device: torch.device) -> None:
        def set_thread_device() -> None:
            if device.type == "cuda":  # each thread has a current device of its own
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
        """Whether the thread has the sampler, which must be left alone until `finish`."""
        return self._growing is not None

    @property
    def ready(self) -> StepRollouts | None:
        """Rollouts that nobody has taken yet; after `finish`, all that there are."""
        return self._ready

    def begin(self, context: RunContext, recipe: Recipe, cursor: int, after: int) -> None:
        """Lets the thread sample with the sampler's present weights, which are those of `after`."""
        share = self._thread.submit(sample_first_share, context, recipe, cursor)
        self._growing = _PendingShare(share, recipe, cursor, after)

    def finish(self, context: RunContext) -> None:
        """Waits for what is in flight and gives the sampler the weights that it was kept from.

        Every rank calls it. What the thread leaves to do, such as drawing again where there was no
        signal, is done here, with the weights that sampled the rest.
        """
        growing = self._growing
        if growing is None:
            return
        context.progress.show_activity("generation")
        share = growing.share.result()
        self._ready = collect_rollouts(
            context, growing.recipe, growing.cursor, growing.after, share
        )
        self._growing = None
        synchronize_sampler(context)

    def restore_rollouts(self, rollouts: StepRollouts) -> None:
        """Takes in what was in flight when a checkpoint was written."""
        self._ready = rollouts

    def take(self, context: RunContext) -> StepRollouts | None:
        """The rollouts that were sampled ahead; None where there are none. Every rank calls it."""
        self.finish(context)
        taken, self._ready = self._ready, None
        return taken
