"""`make scale`: a made-up step of 10,000 rollouts through scoring, credit and recording, by part.

    python tests/benchmarks/scale.py                    some minutes; writes into docs/scale.md
    python tests/benchmarks/scale.py --rollouts 64,256 --tokens 400 --ranks 1,2 --page page.md

Every number of rollouts goes through one rank, and the largest through every number of ranks, all
in processes of their own. PostgreSQL is a server that it starts itself; where it is not
installed, its part is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from bench import QUIET
from scale_page import PAGE, build_tables, write_tables
from scale_parts import Order
from shapes import Shape
from two_turn_step import build_shape

sys.path.insert(0, str(Path(__file__).parents[1]))
from patience import find_free_port, stop_process, wait_until
from postgres import Server, binaries, server

__all__ = ["main", "measure_step", "open_server"]

LIMIT = 3600.0
"""Seconds in which all ranks have to end."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and writes the tables into the page."""
    chosen = _read_options(arguments)
    shapes = {n: build_shape(n, chosen.tokens) for n in chosen.rollouts}
    largest = max(shapes)
    with open_server() as database:
        alone = {n: measure_step(shape, 1, database) for n, shape in shapes.items()}
        among = {
            n: alone[largest] if n == 1 else measure_step(shapes[largest], n, database)
            for n in chosen.ranks
        }
    firsts = {n: found[0] for n, found in alone.items()}
    if chosen.figures is not None:
        chosen.figures.write_text(json.dumps({"alone": firsts, "ranks": among}, indent=2) + "\n")
    write_tables(chosen.page, build_tables(shapes[largest], chosen.tokens, firsts, among))


def _read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    def read_numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    options = argparse.ArgumentParser(description="A step of many rollouts, by part.")
    options.add_argument("--rollouts", type=read_numbers, default=[640, 2560, 10_000])
    options.add_argument("--tokens", type=int, default=2000, help="of a rollout, prompt included")
    options.add_argument("--ranks", type=read_numbers, default=[1, 2, 4])
    options.add_argument("--page", type=Path, default=PAGE)
    options.add_argument("--figures", type=Path, help="JSON of what every rank measured")
    return options.parse_args(arguments)


def measure_step(shape: Shape, ranks: int, database: Server | None = None) -> list[dict[str, Any]]:
    """What every rank measured, the first rank first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        registries = {"SQLite": f"sqlite:///{folder}/registry.db"}
        if database is not None:
            registries["PostgreSQL"] = database.url(database.create())
        order = Order(str(folder / "run"), astuple(shape), registries)
        (folder / "order.json").write_text(json.dumps(asdict(order)))
        _run_ranks(folder / "order.json", ranks)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _run_ranks(order: Path, count: int) -> None:
    """Runs all ranks side by side.

    Raises:
        RuntimeError: one of them failed; the others are ended.
    """
    program = Path(__file__).with_name("scale_rank.py")
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    with ExitStack() as stack:
        running, logs = [], [order.parent / f"rank{rank}.log" for rank in range(count)]
        for rank, log in enumerate(logs):
            process = subprocess.Popen(
                [sys.executable, str(program), str(order)],
                env={**os.environ, **QUIET, **group, "WORLD_SIZE": str(count), "RANK": str(rank)},
                stderr=stack.enter_context(log.open("w")),
            )
            stack.callback(stop_process, process)
            running.append(process)

        def has_ended() -> bool:
            codes = [process.poll() for process in running]
            return any(codes) or None not in codes

        wait_until("the ranks to end", has_ended, LIMIT)
        for process, log in zip(running, logs, strict=True):
            if process.poll():
                raise RuntimeError(f"a rank failed: {log.read_text()[-2000:]}")


# Servers -----------------------------------------------------------------------------------------


@contextmanager
def open_server() -> Iterator[Server | None]:
    """PostgreSQL, with fsync; None where there is none."""
    if binaries() is None:
        yield None
        return
    with server(settings=()) as database:
        yield database


if __name__ == "__main__":
    main()
