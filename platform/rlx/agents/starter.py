"""The process that starts the programs of agents, each in a session and a folder of its own.

It imports a function once and forks for each of its calls. Orders and reports are lines of JSON: a
report for each program that ended, and an empty one once all have been ended as ordered.
"""

import asyncio
import inspect
import json
import os
import resource
import selectors
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from rlx.descendants import (
    adopt_orphans,
    die_with_parent,
    kill_descendants,
    kill_processes,
    list_descendants,
    reap_orphans,
)
from rlx.plugin_files import load_function

OUTPUT, PROBLEM, FOLDER = "output.txt", "problem.json", "work"
"""In a program's folder: what it prints, what it is given, and the folder that it starts in."""
NOT_STARTED = 127
"""Exit code of a program that cannot be started, as of a shell."""


class _Starter:
    def __init__(self, reports: int) -> None:
        self._reports = reports
        self._running: dict[int, int] = {}
        self._functions: dict[str, Callable[..., Any]] = {}

    def serve(self) -> None:
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        for source in (0, woken):
            selector.register(source, selectors.EVENT_READ)
        rest = b""
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if woken in ready:
                with suppress(BlockingIOError):
                    os.read(woken, 1 << 16)
                self._report_ended()
            if 0 in ready:
                if not (read := os.read(0, 1 << 20)):
                    return
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    self._carry_out(json.loads(line))

    def _carry_out(self, order: Mapping[str, Any]) -> None:
        if "end" in order:
            kill_descendants()
            self._running.clear()
            self._write_report()
            return
        if "kill" in order:
            for pid in [pid for pid, number in self._running.items() if number == order["kill"]]:
                _kill_program(pid)
            return
        if (name := order["function"]) is not None and name not in self._functions:
            try:
                self._functions[name] = load_function(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001  (the code of others)
                why = f"{name} cannot be imported: {type(error).__name__}: {error}"
                self._write_report(number=order["number"], fault=why)
                return
        pid = os.fork()
        if not pid:
            os.close(self._reports)
            _become_program(order, self._functions)
        self._running[pid] = order["number"]

    def _report_ended(self) -> None:
        """Reports the programs that have ended, and ends what they left in their groups."""
        for pid, number in list(self._running.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            del self._running[pid]
            self._write_report(number=number, code=os.waitstatus_to_exitcode(status))
        if not self._running:
            reap_orphans()

    def _write_report(self, **report: Any) -> None:
        os.write(self._reports, json.dumps(report).encode() + b"\n")


def _kill_program(pid: int) -> None:
    below = list_descendants(pid)
    for kill in (os.kill, os.killpg):  # it may not have its group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    kill_processes(below)


def _become_program(
    order: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]
) -> NoReturn:
    code = 1
    try:
        die_with_parent()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        folder = Path(order["folder"])
        for name, flags, numbers in (
            (PROBLEM, os.O_RDONLY, (0,)),
            (OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, (1, 2)),
        ):
            opened = os.open(folder / name, flags, 0o600)
            for number in numbers:
                os.dup2(opened, number)
            os.close(opened)
        os.environ.update(order["environment"])
        _limit_resources(order["memory"], order["file"])
        os.chdir(folder / FOLDER)
        if order["command"] is not None:
            program, *arguments = order["command"]
            program = sys.executable if program == "python" else program
            try:
                os.execvp(program, [program, *arguments])
            except OSError as error:
                code = NOT_STARTED
                raise SystemExit(f"{program}: {error.strerror}") from error
        result = functions[order["function"]](*order["arguments"])
        if inspect.iscoroutine(result):
            asyncio.run(result)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        elif code != NOT_STARTED:
            code = error.code if isinstance(error.code, int) else 0
    except BaseException:  # noqa: BLE001  (what it prints is the reason)
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _limit_resources(memory: int | None, file: int) -> None:
    limits = {resource.RLIMIT_FSIZE: file, resource.RLIMIT_CORE: 0}
    if memory is not None:
        limits[resource.RLIMIT_AS] = memory
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def main(folder: str) -> None:
    adopt_orphans()
    # What a module prints while it is imported must not be read as a report.
    reports = os.dup(1)
    os.dup2(2, 1)
    try:
        _Starter(reports).serve()
    finally:
        kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
