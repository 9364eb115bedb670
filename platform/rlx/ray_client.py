"""Joins a Ray cluster from a rank, which is a process of its own beside its actor."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["join_ray"]


@contextmanager
def join_ray(cluster: str, namespace: str) -> Iterator[None]:
    """Connects this process to a cluster until the block ends, unless it is connected.

    Args:
        cluster: HOST:PORT of the cluster's head.
        namespace: Ray's namespace, in which it finds actors by name.

    Raises:
        ConnectionError: the cluster cannot be reached.
    """
    import ray

    if ray.is_initialized():  # by a block around this one
        yield
        return
    with _keep_signal_handlers():
        ray.init(
            address=cluster,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Puts back this process's handlers of signals, in place of those that Ray has set."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
