"""Tasksets of verifiers, in an interpreter of their own: its pins conflict with those of rlx."""

import hashlib
import json
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock, Timer
from typing import Any, ClassVar, NoReturn

from pydantic import Field

from rlx.plugin import Action, Demonstration, Environment, Problem, Split, Step, expand_path
from rlx_gyms.libraries import GymTask, is_of_split

_PROGRAM = Path(__file__).with_name("verifiers_worker.py")
_LONGEST_MESSAGE = 1_000_000
"""Longest message in bytes that is read from the other side."""
_START_SECONDS, _ROW_SECONDS, _SCORE_SECONDS = 60.0, 30.0, 30.0
"""For the import of a taskset, and for answers."""


class RemoteFault(Exception):
    """The other side fails: it is not there, too slow, or answers what cannot be read."""


@dataclass(frozen=True, slots=True)
class TasksetSource:
    """A taskset: its package or folder, the interpreter that has verifiers, and options as JSON."""

    python: str
    taskset: str
    config: str


class TasksetProcess:
    """A process that serves one taskset. It is started by the first request, and after a fault."""

    def __init__(self, source: TasksetSource, program: Path = _PROGRAM) -> None:
        self._source, self._program = source, program
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0

    def count(self) -> int:
        """Returns the number of rows; raises RemoteFault if the taskset cannot be loaded."""
        with self._lock:
            self._start()
            return self._count

    def request(self, kind: str, timeout: float, **data: Any) -> Mapping[str, Any]:
        """Returns the answer to a request; a process that gives none in time is ended."""
        with self._lock:
            process = self._start()
            assert process.stdin
            with suppress(BrokenPipeError):  # it has ended, and reading says why
                process.stdin.write(json.dumps({"type": kind, "data": data}).encode() + b"\n")
                process.stdin.flush()
            return self._read_message(process, timeout, kind)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        source = self._source
        options = {"taskset": source.taskset, "config": json.loads(source.config)}
        command = [source.python, "-P", str(self._program), json.dumps(options)]
        errors = TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors)
        except OSError as error:
            errors.close()
            raise RemoteFault(f"{source.python} cannot be run: {error.strerror}") from None
        self._process, self._errors = process, errors
        try:
            self._count = int(self._read_message(process, _START_SECONDS, "start")["count"])
        except RemoteFault:
            self._end()
            raise
        return process

    def _read_message(
        self, process: subprocess.Popen[bytes], timeout: float, kind: str
    ) -> Mapping[str, Any]:
        """Reads the message of the next line; a process that sends no readable one is ended."""
        assert process.stdout
        began, fault = time.monotonic(), ""
        message: Mapping[str, Any] = {}
        alarm = Timer(timeout, process.kill)
        alarm.start()
        try:
            line = process.stdout.readline(_LONGEST_MESSAGE)
            if line.endswith(b"\n"):
                message = json.loads(line, parse_constant=_refuse_constant)
                if not isinstance(message, dict):
                    fault = f"sent {type(message).__name__}, not an object"
            elif len(line) == _LONGEST_MESSAGE:
                fault = "sent more than one megabyte"
            elif process.wait() == -signal.SIGKILL and time.monotonic() - began >= timeout:
                fault = f"does not answer `{kind}` within {timeout:g} s"
            else:
                fault = f"ended its process in `{kind}`: {self._read_last_error()}"
        except (ValueError, RecursionError) as error:
            fault = f"sent invalid JSON: {error}"
        finally:
            alarm.cancel()
        if fault:
            self._end()
            raise RemoteFault(f"{self._source.taskset} {fault}")
        if "error" in message:
            raise RemoteFault(self._describe(message))
        return message

    def _read_last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line[:300] for line in lines[::-1] if line.strip()), "it says nothing")

    def _describe(self, message: Mapping[str, Any]) -> str:
        source, text = self._source, str(message.get("message"))[:500]
        if message["error"] == "ModuleNotFoundError" and "'verifiers'" in text:
            python = source.python
            return f"{python} has no verifiers: {python} -m pip install 'verifiers>=0.4,<0.5'"
        return f"{source.taskset} of verifiers raises {message['error']}: {text}"

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError), self._process:
                self._process = None
            self._errors.close()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


@lru_cache(maxsize=8)
def get_process(source: TasksetSource) -> TasksetProcess:
    """The process of a taskset, which serves all episodes of the calling process."""
    return TasksetProcess(source)


class VerifiersEnvironment(Environment):
    """Scores the answers to rows of the task `verifiers` by the taskset's own rewards.

    An episode has one turn: `max_turns: 1`. `info` holds the taskset's `reward`, also as `return`,
    and its rewards, with their weights, and its metrics by name.
    """

    kinds: ClassVar[tuple[str, ...]] = ("turn",)

    def reset(self, problem: Mapping[str, Any], seed: int) -> dict[str, Any]:
        if "taskset" not in problem:
            raise ValueError("the environment `verifiers` works only with the task `verifiers`")
        return {key: value for key, value in problem.items() if key != "data_source"}

    def step(self, state: Mapping[str, Any], action: Action) -> Step:
        source = TasksetSource(**{k: v for k, v in state.items() if k != "index"})
        text = action.text.encode(errors="replace").decode()
        request = {"index": state["index"], "text": text}
        answer = get_process(source).request("score", _SCORE_SECONDS, **request)
        rewards, metrics = (answer.get(part) or {} for part in ("rewards", "metrics"))
        found = {**metrics, **rewards, "reward": answer.get("reward")}
        info = {str(key): _read_number(value, key, source.taskset) for key, value in found.items()}
        info["return"] = info["reward"]
        return Step(kind="turn", state=state, done=True, info=info)


def _read_number(value: Any, name: str, sender: str) -> float:
    if value is not None and not isinstance(value, int | float):
        raise RemoteFault(f"{sender} sent {value!r:.40} as {name}, not a number")
    return float(value or 0.0)


class VerifiersTask(GymTask):
    """Rows of a taskset of verifiers, which an interpreter with verifiers loads and scores.

    A hash of the prompt decides whether a row is for training or for testing. The environment is
    `verifiers`.
    """

    demonstrates: ClassVar[bool] = False

    taskset: str = Field(min_length=1)
    """Name of an installed package, or a folder with a package."""
    python: str = Field(min_length=1)
    """Interpreter that has verifiers: `/path/to/venv/bin/python`."""
    held_out: int = Field(5, ge=2)
    """One in `held_out` prompts is held out for testing."""

    def check(self) -> None:
        try:
            for split in ("train", "test"):
                _list_rows(self._source, self.held_out, split)
        except RemoteFault as fault:
            raise ValueError(str(fault)) from None

    def data(self) -> Mapping[str, str]:
        """Returns a digest of the taskset's files, if it is a folder."""
        folder = expand_path(self.taskset)
        if not folder.is_dir():
            return {}
        digest = hashlib.sha256()
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
                digest.update(file.read_bytes())
        return {f"taskset {self.taskset}": digest.hexdigest()[:16]}

    @property
    def _source(self) -> TasksetSource:
        return TasksetSource(self.python, self.taskset, self.config_text)

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        rows = _list_rows(self._source, self.held_out, split)
        number = random.Random(f"verifiers/{seed}/{split}/{index}").choice(rows)
        prompt, system = _read_row(self._source, number)
        return Problem(
            id=f"verifiers/{self.taskset}/{number}",
            prompt=prompt,
            system=system,
            fields={"data_source": self.taskset, "index": number, **asdict(self._source)},
        )

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        raise NotImplementedError("tasksets of verifiers have no answers to show")


@lru_cache(maxsize=16)
def _list_rows(source: TasksetSource, held_out: int, split: Split) -> tuple[int, ...]:
    rows = tuple(
        number
        for number in range(get_process(source).count())
        if is_of_split(split, _read_row(source, number)[0], held_out)
    )
    if not rows:
        raise ValueError(f"none of the rows of {source.taskset} falls into the split {split!r}")
    return rows


@lru_cache(maxsize=100_000)
def _read_row(source: TasksetSource, index: int) -> tuple[str, str]:
    row = get_process(source).request("row", _ROW_SECONDS, index=index)
    return str(row["prompt"]), str(row["system"])
