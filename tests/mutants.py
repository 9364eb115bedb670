"""Mutants: `make mutants` changes one place of the algorithm after the other, and reports which
changes the tests do not notice in tests/mutants.md.

A mutant is one file with another operator, number, flag or function. It lies in a copy of
its folder, first on the path of imports, so that worker processes read it too. It is
killed when a test of its room fails. tests/mutants.yaml has changes that are always tried, and
verdicts on survivors.
"""

import argparse
import ast
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "tests" / "mutants.yaml"
PAGE = ROOT / "tests" / "mutants.md"
SAMPLE = 60
"""Mutants of each room that are tried."""


class Room(NamedTuple):
    """Code that belongs together, and the tests that should notice a change, the cheapest first."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


JOINTS = ("tests/credit_path", "tests/step")
SCORES = ("table", "over")
ESTIMATES = ("group", "outcome", "place", "returns", "second_level", "turns")
ROOMS = {
    "credit": Room(
        ("platform/rlx/credit/*.py",),
        ("tests/golden", *JOINTS, *(f"tests/credit/test_{name}.py" for name in ESTIMATES)),
    ),
    "mask": Room(("platform/rlx/mask.py",), ("tests/mask", *JOINTS)),
    "loss": Room(("platform/rlx/loss.py",), ("tests/loss", "tests/golden", *JOINTS)),
    "kl": Room(("platform/rlx/kl.py",), ("tests/kl", *JOINTS)),
    "step": Room(("platform/rlx/step.py",), (*JOINTS, "tests/golden")),
    "reward": Room(
        ("platform/rlx/reward/scoring.py",),
        (*(f"tests/reward/test_{name}.py" for name in SCORES), *JOINTS, "tests/golden"),
    ),
    "plugins": Room(
        ("plugins/rlx_plugins/rlcr.py", "plugins/rlx_plugins/countdown/scorer.py"),
        ("tests/plugins/test_rlcr.py", "tests/plugins/test_countdown_scorer.py"),
    ),
}

PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.BitAnd, ast.BitOr),
]
SWAPS = {ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult}
SWAPS |= {old: new for pair in PAIRS for old, new in (pair, pair[::-1])}
FUNCTIONS = {"minimum": "maximum", "amin": "amax", "min": "max", "any": "all", "sum": "mean"}
FUNCTIONS |= {new: old for old, new in FUNCTIONS.items()}


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        change: what becomes what.
        tests: what to run.
    """

    room: str
    place: str
    code: str
    change: str
    source: str = field(repr=False)
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        return self.place.split(":")[0]

    @property
    def rank(self) -> bytes:
        """A random number that stays the same when other lines change."""
        return hashlib.blake2b(f"0 {self.file} {self.code} {self.change}".encode()).digest()


def find_mutants(room: str, file: str) -> Iterator[Mutant]:
    source = (ROOT / file).read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    # Tests that are named after the file come first.
    tests = tuple(sorted(ROOMS[room].tests, key=lambda test: Path(file).stem not in test))
    for node in _walk_code(ast.parse(source)):
        for new in _change(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
            yield Mutant(
                room=room,
                place=f"{file}:{node.lineno}:{node.col_offset + 1}",
                code=lines[node.lineno - 1].decode().strip(),
                change=f"{ast.unparse(node)} → {ast.unparse(new)}",
                source=(source[:start] + text.encode() + source[end:]).decode(),
                tests=tests,
            )


def _walk_code(node: ast.AST) -> Iterator[Any]:
    """The nodes that compute: no annotations, decorators, messages of errors or texts."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return
        case ast.AnnAssign(target=ast.Name(id="examples")):  # a plugin's, which are checks
            return
    yield node
    skipped = {"annotation", "returns", "decorator_list", "bases", "type_params"}
    for name, value in ast.iter_fields(node):
        if name not in skipped:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk_code(child)


def _change(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                if type(op) in SWAPS:
                    yield _replace(node, ops=[*ops[:i], SWAPS[type(op)](), *ops[i + 1 :]])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            yield _replace(node, op=SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
            if not isinstance(operand, ast.Constant):
                yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Attribute(attr=name)) if name in FUNCTIONS:
            yield _replace(node, func=_replace(node.func, attr=FUNCTIONS[name]))
        case ast.Call(func=ast.Name(id="min" | "max" | "any" | "all" as name)):
            yield _replace(node, func=ast.Name(FUNCTIONS[name]))


def _replace(node: Any, **fields: Any) -> Any:
    changed = copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def read_fixed_mutants() -> Iterator[Mutant]:
    """The changes that tests/mutants.yaml lists."""
    for known in yaml.safe_load(LISTS.read_text())["fixed"]:
        file, old, new = known["file"], known["old"], known["new"]
        source = (ROOT / file).read_text()
        if source.count(old) != 1:
            raise ValueError(f"{file} has {source.count(old)} times, not once: {old}")
        yield Mutant(
            room="fixed",
            place=f"{file}:{source[: source.index(old)].count(chr(10)) + 1}",
            code=known["about"],
            change=" ".join(f"{old} → {new}".split()),
            source=source.replace(old, new),
            tests=tuple(known["tests"]),
        )


def try_mutant(mutant: Mutant, limit: float) -> bool:
    """Whether a test of a mutant fails, or takes too long."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        return run_tests(mutant.tests, _write(Path(folder), mutant), limit) != 0


def _write(folder: Path, mutant: Mutant) -> str:
    """Writes a mutant into a copy of all that is beside it; returns where imports find it."""
    first = Path(mutant.file).parts[0]
    shutil.copytree(ROOT / first, folder / first)
    target = folder / mutant.file
    target.write_text(mutant.source)
    os.utime(target, (0, 0))  # what Python has compiled is of another time
    return str(folder / first)


def run_tests(tests: Sequence[str], path: str, limit: float | None = None) -> int | None:
    """Runs tests with what is at a path before rlx; their exit code, None if they take too long."""
    quietly = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    paths = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", *quietly, *tests],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit)
    code = process.returncode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and what the tests have started
    process.wait()
    return code


def check_tests(tests: set[tuple[str, ...]]) -> float:
    """Runs what is to kill mutants without one; returns the seconds that the longest took."""
    longest = 0.0
    for paths in sorted(tests):
        start = time.monotonic()
        if run_tests(paths, ""):
            sys.exit(f"fails without a mutant: {' '.join(paths)}")
        longest = max(longest, time.monotonic() - start)
    return longest


def read_verdicts() -> dict[tuple[str, str, str], str]:
    """Why a survivor is none that a test should kill, by file, line of code and change."""
    verdicts = yaml.safe_load(LISTS.read_text())["survivors"]
    return {(v["file"], v["code"], v["change"]): v["why"] for v in verdicts}


def build_page(results: Sequence[tuple[Mutant, bool]], counts: dict[str, int]) -> str:
    """The page of a run: by room how many mutants there are and were killed, then the survivors."""
    lines = [
        "# Mutants",
        "",
        "Written by `make mutants`: a sample of the changes of each room, with seed 0,",
        "and the list of [mutants.yaml](mutants.yaml). A failing test of a room kills a mutant.",
        "",
        "| room | mutants | tried | killed | share |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for room, count in {**counts, "all": sum(counts.values()), "fixed": 0}.items():
        rooms = counts if room == "all" else (room,)
        own = [is_killed for mutant, is_killed in results if mutant.room in rooms]
        killed = sum(own)
        share = f"{killed / len(own):.1%}" if own else ""
        lines.append(f"| {room} | {count or len(own):,} | {len(own)} | {killed} | {share} |")
    lines += ["", "## Survivors", "", "| place | line | change | why |", f"|{' --- |' * 4}"]
    verdicts = read_verdicts()
    for mutant, is_killed in results:
        if not is_killed:
            why = verdicts.get((mutant.file, mutant.code, mutant.change), "?")
            cells = (mutant.place, f"`{mutant.code}`", f"`{mutant.change}`", why)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def find_all_mutants() -> dict[str, list[Mutant]]:
    """All mutants of each room, in order of their places."""
    return {
        name: [
            mutant
            for pattern in room.sources
            for path in sorted(ROOT.glob(pattern))
            for mutant in find_mutants(name, str(path.relative_to(ROOT)))
        ]
        for name, room in ROOMS.items()
    }


def main() -> None:
    """Tries mutants, and writes the page unless only some of them were asked for."""
    parser = argparse.ArgumentParser(description="changes that tests do not notice")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--only", metavar="FILE[:LINE]", help="the mutants of a file or line")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    rooms = find_all_mutants()
    if arguments.only is not None:
        place = f"{arguments.only}:"
        mutants = [m for own in rooms.values() for m in own if f"{m.place}:".startswith(place)]
    else:
        mutants = list(read_fixed_mutants())
        for own in rooms.values():
            drawn = set(sorted(own, key=lambda mutant: mutant.rank)[:SAMPLE])
            mutants += [mutant for mutant in own if mutant in drawn]
    limit = 60.0 + 5.0 * check_tests({tuple(sorted(mutant.tests)) for mutant in mutants})
    results = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        tried = pool.map(partial(try_mutant, limit=limit), mutants)
        for mutant, is_killed in zip(mutants, tried, strict=True):
            results.append((mutant, is_killed))
            fate = "killed" if is_killed else f"SURVIVES {mutant.code}:"
            done = f"{len(results)}/{len(mutants)}"
            print(f"{done} {fate} {mutant.place} {mutant.change}", flush=True)
    if arguments.only is None:
        PAGE.write_text(build_page(results, {room: len(own) for room, own in rooms.items()}))


if __name__ == "__main__":
    main()
