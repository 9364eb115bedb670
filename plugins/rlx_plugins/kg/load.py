"""Reads knowledge graphs from TSV files (UTF-8), line by line."""

from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path

from rlx.plugin import expand_path
from rlx_plugins.kg.graph import Graph
from rlx_plugins.kg.text import has_visible_text
from rlx_plugins.records import read_text_lines

WORLD = "world"
_NAMES = ("rlx:label", "rlx:kind", "rlx:alias")


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


def build_source_name(name: str) -> str:
    """A short name for `data_source`, such as `kg.world`."""
    return f"kg.{Path(name).name.split('.')[0]}"


@lru_cache(maxsize=1)
def load_world_graph() -> Graph:
    """Returns the graph shipped with rlx: countries, capitals, borders, currencies and so on."""
    with as_file(files("rlx_plugins.kg") / "data" / "world.tsv") as path:
        return read_graph(path)


@lru_cache(maxsize=4)
def _load_graph_file(path: Path, modified: int, size: int) -> Graph:
    return read_graph(path)


def read_graph(path: Path) -> Graph:
    """Reads a graph from a `.tsv` file, which may be compressed with gzip: `.tsv.gz`.

    A line has subject, relation and object, separated by tabs; lines that begin with `#` are
    comments. The relations `rlx:label`, `rlx:kind` and `rlx:alias` give an entity's label, kind and
    aliases; a relation may have a label as well.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is malformed; the message names file and line.
    """
    path = Path(path)
    if not path.name.endswith((".tsv", ".tsv.gz")):
        raise ValueError(f"{path}: its name must end in .tsv or .tsv.gz")
    facts: list[tuple[str, str, str]] = []
    unique: dict[str, dict[str, str]] = {"label": {}, "kind": {}}
    aliases: dict[str, list[str]] = {}
    for where, line in read_text_lines(path):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            subject, relation, object_ = _parse_cells(line)
            what = relation.removeprefix("rlx:")
            if relation not in _NAMES:
                facts.append((subject, relation, object_))
            elif what == "alias":
                aliases.setdefault(subject, []).append(object_)
            elif (known := unique[what].setdefault(subject, object_)) != object_:
                raise ValueError(f"{subject!r} has two {what}s: {known!r} and {object_!r}")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if not facts:
        raise ValueError(f"{path}: has no facts")
    return Graph.from_triples(facts, labels=unique["label"], aliases=aliases, kinds=unique["kind"])


def _parse_cells(line: str) -> list[str]:
    """The three cells of a line, with visible text and a relation that may stand in a file."""
    cells = [cell.strip() for cell in line.split("\t")]
    if len(cells) != 3 or not all(cells):
        raise ValueError(
            "expected subject, relation and object separated by tabs, "
            f"got {sum(map(bool, cells))} of them in {len(cells)} columns"
        )
    if blank := [cell for cell in cells if not has_visible_text(cell)]:
        raise ValueError(f"expected visible text, got {blank[0]!r}")
    if cells[1].startswith("rlx:") and cells[1] not in _NAMES:
        raise ValueError(f"expected rlx:label, rlx:kind or rlx:alias, got {cells[1]!r}")
    return cells
