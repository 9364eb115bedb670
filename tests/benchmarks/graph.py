"""A graph of a million facts, read from a file and asked by name, beside dicts of dicts.

    python tests/benchmarks/graph.py sorted|dicts FILE

prints what one process spent, as JSON; `make bench` runs each side three times.
"""

import hashlib
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

FACTS, ENTITIES, RELATIONS, QUERIES = 1_000_000, 200_000, 500, 100_000
ROUNDS = 3


def knowledge_graph() -> list[dict]:
    """CPU seconds to load, memory, and queries per CPU second."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "facts.tsv"
        write(path)
        spent = {
            side: [measured(side, path) for _ in range(ROUNDS)] for side in ("sorted", "dicts")
        }
    answers = {run["answers"] for runs in spent.values() for run in runs}
    assert len(answers) == 1, "the two sides disagree"

    def row(name: str, figure: str, unit: str) -> dict:
        ours, theirs = ([run[figure] for run in spent[side]] for side in ("sorted", "dicts"))
        return {
            "name": f"{name} 1000000",
            "ratio": round(statistics.median(ours), 2),
            "low": round(min(ours), 2),
            "high": round(max(ours), 2),
            "baseline": f"dicts of dicts, {statistics.median(theirs):.3g}",
            "unit": unit,
        }

    return [
        row("graph_load", "load", "CPU s"),
        row("graph_memory", "memory", "MiB at the most"),
        row("graph_queries", "queries", "thousand per CPU s"),
    ]


def write(path: Path) -> None:
    """A million lines, some relations and entities in many more facts than others."""
    rng = random.Random(0)

    def drawn(count: int) -> int:
        return int(count * rng.random() ** 2)

    with path.open("w") as stream:
        for _ in range(FACTS):
            subject, relation, other = drawn(ENTITIES), drawn(RELATIONS), drawn(ENTITIES)
            stream.write(f"m.{subject:06x}\tdomain.type.p{relation:03}\tm.{other:06x}\n")


def measured(side: str, path: Path) -> dict:
    command = [sys.executable, __file__, side, str(path)]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def queries(path: Path) -> list[tuple[int, str, str]]:
    """Which of the four functions to ask, and its entity and relation, of facts drawn at random."""
    rng = random.Random(1)
    chosen = set(rng.sample(range(FACTS), QUERIES))
    made = []
    with path.open() as stream:
        for number, line in enumerate(stream):
            if number in chosen:
                function = rng.randrange(4)
                subject, relation, other = line.rstrip().split("\t")
                made.append((function, other if function % 2 else subject, relation))
    return made


def sorted_arrays(path: Path) -> Callable[[int, str, str], list[str]]:
    """The graph of rlx."""
    from rlx_plugins.kg.load import read_graph

    graph = read_graph(path)

    def answer(function: int, name: str, verb: str) -> list[str]:
        entity, relation = graph.entity(name), graph.relation(verb)
        if function < 2:
            found = (graph.heads if function else graph.tails)(entity, relation)
            return [graph.label(x) for x in found]
        found = (graph.head_relations if function == 3 else graph.tail_relations)(entity)
        return [graph.relation_name(x) for x in found]

    return answer


def dicts_of_dicts(path: Path) -> Callable[[int, str, str], list[str]]:
    """Three dicts of dicts of sets over interned numbers, as one would write them first."""
    spo: dict = {}
    pos: dict = {}
    osp: dict = {}
    numbers: dict[str, int] = {}
    verbs: dict[str, int] = {}
    with path.open() as stream:
        for line in stream:
            subject, relation, other = line.rstrip().split("\t")
            s = numbers.setdefault(subject, len(numbers))
            p = verbs.setdefault(relation, len(verbs))
            o = numbers.setdefault(other, len(numbers))
            spo.setdefault(s, {}).setdefault(p, set()).add(o)
            pos.setdefault(p, {}).setdefault(o, set()).add(s)
            osp.setdefault(o, {}).setdefault(s, set()).add(p)
    names, relations = list(numbers), list(verbs)

    def answer(function: int, name: str, verb: str) -> list[str]:
        entity, relation = numbers[name.casefold()], verbs[verb.casefold()]
        if function == 0:
            return sorted(names[x] for x in spo[entity][relation])
        if function == 1:
            return sorted(names[x] for x in pos[relation][entity])
        if function == 2:
            return sorted(relations[x] for x in spo[entity])
        return sorted(relations[x] for x in set().union(*osp[entity].values()))

    return answer


def main(side: str, path: Path) -> None:
    asked = queries(path)
    before, began = peak(), time.process_time()
    answer = {"sorted": sorted_arrays, "dicts": dicts_of_dicts}[side](path)
    load, memory = time.process_time() - began, peak() - before
    began = time.process_time()
    answers = [answer(*query) for query in asked]
    speed = QUERIES / (time.process_time() - began)
    digest = hashlib.sha256(json.dumps(answers).encode()).hexdigest()
    print(json.dumps({"load": load, "memory": memory, "queries": speed / 1e3, "answers": digest}))


def peak() -> float:
    """MiB that this process has held at the most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
