"""The vLLM servers of a run: actors of Ray that sample for all of its ranks.

Ray places them together with the ranks. It starts one again that was lost with its process or its
node, on a node that has room for it, and asks it what the lost one had not answered.
"""

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlx.launch.ray_actor import ActorOrder, enter_run
from rlx.launch.ray_launcher import SERVER_KIND
from rlx.launch.ray_reservation import Reservation
from rlx.sampler import ServersAddress
from rlx.spec import RunnerSpec

__all__ = ["ServerActor", "WeightStore", "start_servers"]

LIVES = 3
"""Times that a request is sent to a server that is lost while it answers."""
Published = Mapping[str, tuple[int, list[Any]]]
"""Number and references of the weights of each kind; see `rlx.sampler.cluster_pool`."""


class WeightStore:
    """Knows where the model of a run and its current weights are in Ray's object store."""

    def __init__(self) -> None:
        self._starts: Counter[int] = Counter()
        self._model: list[Any] = []
        self._version = 0
        self._published: Published = {}
        self._changed = asyncio.Condition()

    async def find_host(self) -> str:
        """The name of its machine."""
        return socket.gethostname()

    async def end(self) -> None:
        """Does nothing: it has started nothing."""

    async def publish_model(self, model: list[Any]) -> None:
        """Takes the reference to what servers start from."""
        async with self._changed:
            self._model = model
            self._changed.notify_all()

    async def publish(self, version: int, published: Published) -> None:
        """Takes references to weights, in place of those before.

        Args:
            version: the number of those that are new.
            published: all that a server loads to have them.
        """
        async with self._changed:
            self._version, self._published = version, published
            self._changed.notify_all()

    async def start(self, number: int) -> tuple[int, list[Any]]:
        """For a server that starts: how often it has done so before, and its model."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._model))
        self._starts[number] += 1
        return self._starts[number] - 1, self._model

    async def find(self, version: int) -> Published:
        """Waits until weights have been published; returns all that a server loads then."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version >= version)
        return self._published


class ServerActor:
    """Keeps one vLLM server; see `rlx.sampler.ClusterServer`."""

    def __init__(self, order: ActorOrder, number: int, store: str, namespace: str) -> None:
        self._exit = ExitStack()
        folder = enter_run(order, self._exit)
        from rlx.sampler import ClusterServer  # imports torch

        self._server = ClusterServer(number, ray.get_actor(store, namespace), folder)

    def find_host(self) -> str:
        """The name of its machine."""
        return socket.gethostname()

    def describe(self) -> dict[str, Any]:
        """See `rlx.sampler.ClusterServer`."""
        return self._server.describe()

    def load(self, version: int) -> dict[str, Any]:
        """See `rlx.sampler.ClusterServer`."""
        return self._server.load(version)

    def generate(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """See `rlx.sampler.ClusterServer`."""
        return self._server.generate(message)

    def end(self) -> None:
        """Ends the server."""
        self._server.close()
        self._exit.close()


def start_servers(
    reservation: Reservation, runner: RunnerSpec, order: ActorOrder, ahead: int
) -> tuple[list[Any], ServersAddress | None]:
    """Starts the servers of a run, if it has any; returns actors, and where its ranks find them.

    They load vLLM when the first rank has said which model they are to serve.

    Args:
        ahead: number of steps whose rollouts are in flight at most.
    """
    count = reservation.count(SERVER_KIND)
    if not count:
        return [], None
    namespace, store = secrets.token_hex(8), "weights"
    context = ray.get_runtime_context()
    here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
    kept = (
        ray.remote(WeightStore)
        .options(num_cpus=0, name=store, namespace=namespace, scheduling_strategy=here)
        .remote()
    )
    names = [f"server-{number}" for number in range(count)]
    # They fetch no models.
    inherited = {k: v for k, v in order["environment"].items() if k != "HF_TOKEN"}
    order = {**order, "environment": inherited}
    actors = [
        reservation.start(
            SERVER_KIND,
            number,
            ServerActor,
            order,
            number,
            store,
            namespace,
            name=name,
            namespace=namespace,
            # Of every rank those of the steps in flight, one of its own, and its end.
            max_concurrency=(ahead + 2) * runner.ranks + 1,
            max_restarts=-1,
            max_task_retries=LIVES - 1,
        )
        for number, name in enumerate(names)
    ]
    cluster = str(context.gcs_address)
    address: ServersAddress = {
        "cluster": cluster,
        "namespace": namespace,
        "names": names,
        "store": store,
    }
    return [*actors, kept], address
