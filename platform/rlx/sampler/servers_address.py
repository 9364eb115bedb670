"""How a rank finds the vLLM servers of its run on a Ray cluster."""

from typing import TypedDict

__all__ = ["SERVERS", "ServersAddress"]

SERVERS = "RLX_SERVERS"
"""Environment variable of a rank with the address of its run's servers as JSON, if it has any."""


class ServersAddress(TypedDict):
    """Where the servers of a run are.

    Attributes:
        cluster: HOST:PORT of the cluster's head.
        namespace: Ray's namespace that has their names.
        names: their names.
        store: the name of the actor that knows the current weights.
    """

    cluster: str
    namespace: str
    names: list[str]
    store: str
