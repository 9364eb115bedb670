"""Runs the programs of agents, in processes below one that starts them."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Self

from rlx.agents.starter import FOLDER, OUTPUT, PROBLEM
from rlx.spec import AgentRolloutSpec
from rlx.text import shorten_for_record

LONGEST_TAIL = 300
"""Characters of a program's last words that are kept with the reason of its failure."""
_LAST_WORDS = 4096
"""Bytes of a program's output in which the reason of its failure is looked for."""
_ERROR = re.compile(
    r"^ *(?:\[cause\]: )?[\w.]*(?:error|exception|panic)\b.*$", re.IGNORECASE | re.MULTILINE
)
_MIB = 1 << 20
_LOCAL = "127.0.0.1,localhost"


class ProgramStarter:
    """The process that starts programs, which imports a function once for all of its calls."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.folder: Path

    def begin(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self.folder = Path(tempfile.mkdtemp(prefix="rlx-agents-"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlx.agents.starter", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def order(self, **order: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):  # whoever reads its reports notices that it has ended
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def read_reports(self) -> Iterator[dict[str, Any]]:
        assert self._process is not None and self._process.stdout is not None
        return map(json.loads, iter(self._process.stdout.readline, b""))

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._process = None


class ProgramRunner:
    """Starts programs and has `report` called, from another thread, with the number of every
    program that ended and why it failed, if it did; a context manager that ends those that are
    left."""

    def __init__(
        self,
        spec: AgentRolloutSpec,
        starter: ProgramStarter,
        report: Callable[[int, str | None], None],
    ) -> None:
        self._spec, self._starter, self._report = spec, starter, report
        self._command = None if spec.command is None else list(map(_anchor_argument, spec.command))
        self._running: set[int] = set()

    def __enter__(self) -> Self:
        self._starter.begin()
        self._is_lost = False
        self._reader = Thread(target=self._read_reports, name="rlx-agents", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._starter.order(end=True)
        self._reader.join()
        if self._is_lost:
            self._starter.close()  # the next begins another

    def start(self, number: int, problem: Mapping[str, Any], address: str, key: str) -> None:
        folder = self._locate(number)
        (folder / FOLDER).mkdir(parents=True)
        (folder / PROBLEM).write_text(json.dumps(problem), encoding="utf-8")
        others = [os.environ[name] for name in ("NO_PROXY", "no_proxy") if name in os.environ]
        unproxied = ",".join([_LOCAL, *others])
        memory = self._spec.memory_mb
        self._running.add(number)
        self._starter.order(
            number=number,
            command=self._command,
            function=self._spec.function,
            arguments=[problem, address, key],
            folder=str(folder),
            environment={
                "OPENAI_BASE_URL": address,
                "OPENAI_API_KEY": key,
                "RLX_PROBLEM": str(folder / PROBLEM),
                "TMPDIR": str(folder / FOLDER),
                "NO_PROXY": unproxied,
                "no_proxy": unproxied,
            },
            memory=None if memory is None else memory * _MIB,
            file=self._spec.file_mb * _MIB,
        )

    def kill(self, number: int) -> None:
        """Kills a program and what it started; its end is reported as of any other."""
        self._starter.order(kill=number)

    def _locate(self, number: int) -> Path:
        return self._starter.folder / str(number)

    def _read_reports(self) -> None:
        for report in self._starter.read_reports():
            if "number" not in report:
                break
            self._end(report["number"], report)
        else:
            self._is_lost = True
        for number in list(self._running):
            self._end(number, {"fault": "the process that starts programs has ended"})

    def _end(self, number: int, report: Mapping[str, Any]) -> None:
        fault = report["fault"] if "fault" in report else self._describe_end(number, report["code"])
        self._running.discard(number)
        shutil.rmtree(self._locate(number), ignore_errors=True)
        self._report(number, fault)

    def _describe_end(self, number: int, code: int) -> str | None:
        """Why a program failed, with its last words; None if it did not."""
        if code == 0:
            return None
        said = b""
        with suppress(OSError), (self._locate(number) / OUTPUT).open("rb") as output:
            size = output.seek(0, os.SEEK_END)
            if size >= self._spec.file_mb * _MIB:
                return f"it printed more than {self._spec.file_mb} MiB"
            output.seek(max(0, size - _LAST_WORDS))
            said = output.read()
        if code == -signal.SIGXFSZ:
            return f"it wrote a file of more than {self._spec.file_mb} MiB"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        words = said.decode(errors="replace").strip()
        return shorten_for_record(f"{how}: {find_reason(words)}" if words else how, LONGEST_TAIL)


def find_reason(words: str) -> str:
    """The last line of a program's last words that names an error, or else the last line."""
    lines = _ERROR.findall(words) or words.splitlines()
    return str(lines[-1]).strip()


def compute_command_digests(spec: AgentRolloutSpec) -> list[str]:
    """SHA-256 of each file that is named by an argument of an agent's command."""
    arguments = map(_anchor_argument, (spec.command or ())[1:])
    files = [Path(argument) for argument in arguments if Path(argument).is_file()]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def _anchor_argument(argument: str) -> str:
    """An argument that names a file, with its whole path: a program has a folder of its own."""
    path = Path(argument)
    is_file = not argument.startswith("-") and path.is_file()
    return str(path.absolute()) if is_file else argument
