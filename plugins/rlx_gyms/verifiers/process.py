"""A worker in another interpreter that answers lines of JSON, and is ended if it does not."""

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Any

from rlx_gyms.remote import LONGEST_MESSAGE, RemoteFault, read_message

__all__ = ["TasksetProcess", "TasksetSource", "get_process"]

_PROGRAM = Path(__file__).parent / "worker.py"

_START = 60.0
"""Seconds for the import of a taskset."""


@dataclass(frozen=True, slots=True)
class TasksetSource:
    """Where a taskset is.

    Attributes:
        python: the interpreter that has verifiers.
        taskset: name of its package, or a folder.
        config: options of the taskset, as JSON.
        size: how many of its rows are read.
    """

    python: str
    taskset: str
    config: str
    size: int


class TasksetProcess:
    """A process that serves one taskset. It is started by the first request, and after a fault.

    Args:
        source: the taskset.
        program: the file that the interpreter runs.
    """

    def __init__(self, source: TasksetSource, program: Path = _PROGRAM) -> None:
        self._source, self._program = source, program
        self._lock = Lock()
        self._errors: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0

    def count(self) -> int:
        """Returns the number of rows.

        Raises:
            RemoteFault: the taskset cannot be loaded.
        """
        with self._lock:
            self._start()
            return self._count

    def request(self, kind: str, timeout: float, **data: Any) -> Mapping[str, Any]:
        """Returns the answer to a request; a process that gives none in time is ended.

        Raises:
            RemoteFault: it gives none, or a fault.
        """
        with self._lock:
            process = self._start()
            line = json.dumps({"type": kind, "data": data}) + "\n"
            try:
                assert process.stdin
                process.stdin.write(line.encode())
                process.stdin.flush()
                return self._read(timeout, kind)
            except BrokenPipeError:
                fault = f"{self._source.taskset} ended its process: {self._read_last_error()}"
                self._end()
                raise RemoteFault(fault) from None

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        source = self._source
        options = {
            "taskset": source.taskset,
            "config": json.loads(source.config),
            "size": source.size,
        }
        command = [source.python, "-P", str(self._program), json.dumps(options)]
        self._errors = TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            self._end()
            raise RemoteFault(f"{source.python} cannot be run: {error.strerror}") from None
        try:
            self._count = int(self._read(_START, "start")["count"])
        except RemoteFault:
            self._end()
            raise
        return self._process

    def _read(self, timeout: float, kind: str) -> Mapping[str, Any]:
        try:
            message = read_message(self._read_line(timeout, kind), self._source.taskset)
        except RemoteFault:
            self._end()
            raise
        if "error" in message:
            raise RemoteFault(self._describe(message))
        return message

    def _read_line(self, timeout: float, kind: str) -> bytes:
        """Reads up to the end of a line."""
        process, end = self._process, time.monotonic() + timeout
        assert process and process.stdout
        received = bytearray()
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise RemoteFault(
                    f"{self._source.taskset} does not answer `{kind}` within {timeout:g} s"
                )
            part = os.read(process.stdout.fileno(), 65536)
            received += part
            if not part:
                raise RemoteFault(
                    f"{self._source.taskset} ended its process in `{kind}`: "
                    f"{self._read_last_error()}"
                )
            if len(received) > LONGEST_MESSAGE:
                raise RemoteFault(f"{self._source.taskset} sent more than one megabyte")
        return bytes(received)

    def _read_last_error(self) -> str:
        assert self._errors
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
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        for opened in (process and process.stdin, process and process.stdout, self._errors):
            if opened:
                opened.close()


@lru_cache(maxsize=8)
def get_process(source: TasksetSource) -> TasksetProcess:
    """Returns the process of a taskset, which serves all episodes of the calling process."""
    return TasksetProcess(source)
