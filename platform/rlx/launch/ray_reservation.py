"""Places the actors of a run on the nodes of the Ray cluster that this process has joined."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlx.launch.ray_head import HeadWatch
from rlx.launch.ray_launcher import Demand

__all__ = ["Reservation", "reserve_places"]


TRACE = 0.001
"""Amount of the resource that stands for a node, of which each has 1."""


class Reservation:
    """What all actors of a run take, reserved together: a run has all of it, or waits.

    Args:
        demands: what it takes.
        strategy: Ray's, of placement groups.
        first_here: whether the first of the first kind must be on this node.
    """

    def __init__(self, demands: Sequence[Demand], strategy: str, *, first_here: bool) -> None:
        self.demands = demands
        bundles = [dict(demand.bundle) for demand in demands for _ in range(demand.count)]
        if first_here:
            bundles[0][f"node:{ray.util.get_node_ip_address()}"] = TRACE
        self.group: Any = placement_group(bundles, strategy=strategy)

    def wait(self, seconds: float) -> bool:
        """Waits until all of it is reserved; False after the timeout."""
        return bool(self.group.wait(seconds))

    def count(self, kind: str) -> int:
        """How many actors of a kind there are to be."""
        return next((demand.count for demand in self.demands if demand.kind == kind), 0)

    def start(self, kind: str, number: int, actor: type, *arguments: Any, **options: Any) -> Any:
        """Starts the actor of a kind with a number from 0 on, in its place.

        Args:
            arguments: of the actor's class.
            options: Ray's, of the actor.
        """
        before = 0
        for demand in self.demands:
            if demand.kind == kind:
                break
            before += demand.count
        taken = dict(demand.bundle)
        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=before + number
        )
        placed = {
            "num_cpus": taken.pop("CPU", 0),
            "num_gpus": taken.pop("GPU", 0),
            "memory": taken.pop("memory", None),
            "resources": taken,
            "scheduling_strategy": strategy,
        }
        return ray.remote(actor).options(**placed, **options).remote(*arguments)


@contextmanager
def reserve_places(
    demands: Sequence[Demand], strategy: str, head: HeadWatch, *, first_here: bool
) -> Iterator[Reservation]:
    """Reserves what a run takes as soon as it is free, and gives it back; see `Reservation`."""
    reservation = Reservation(demands, strategy, first_here=first_here)
    try:
        yield reservation
    finally:
        if head.find_loss() is None:  # else Ray would wait for it
            with suppress(RayError):
                remove_placement_group(reservation.group)
