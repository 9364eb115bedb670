"""Joins a Ray cluster from a rank, which is a process of its own beside its actor."""

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["find_actors", "join_ray"]


@contextmanager
def join_ray(cluster: str) -> Iterator[None]:
    """Connects this process to a cluster until the block ends, unless it is connected.

    Args:
        cluster: HOST:PORT of the cluster's head.

    Raises:
        ConnectionError: the cluster cannot be reached.
    """
    # A thread that asks when this process has left must not start a cluster of its own.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    import ray

    if ray.is_initialized():  # by a block around this one
        yield
        return
    with _keep_signal_handlers():
        ray.init(
            address=cluster,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    try:
        yield
    finally:
        ray.shutdown()


def find_actors(names: Sequence[str], namespace: str) -> list[Any]:
    """The actors of these names.

    Raises:
        ConnectionError: one is gone.
    """
    import ray

    try:
        return [ray.get_actor(name, namespace) for name in names]
    except ValueError as error:
        raise ConnectionError(f"an actor of the run is gone: {error}") from error


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Puts back this process's handlers of signals, in place of those that Ray has set."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
