"""Loads the graph that the option `graph` of a task or environment names."""

from functools import lru_cache
from pathlib import Path

from rlx.plugin import expand_path
from rlx_plugins.kg.graph import Graph
from rlx_plugins.kg.load import load_world_graph, read_graph

WORLD = "world"


def load_named_graph(name: str) -> Graph:
    """Returns the shipped graph for `world`, else the file's graph, cached until the file changes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is malformed; the message names file and line.
    """
    if name == WORLD:
        return load_world_graph()
    path = expand_path(name)
    try:
        stamp = path.stat()
    except OSError as error:
        raise OSError(f"cannot read the graph {path}: {error.strerror}") from None
    return _load_graph_file(path, stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=4)
def _load_graph_file(path: Path, modified: int, size: int) -> Graph:
    return read_graph(path)


def source_name(name: str) -> str:
    """A short name for `data_source`, such as `kg.world`."""
    return f"kg.{Path(name).name.split('.')[0]}"
