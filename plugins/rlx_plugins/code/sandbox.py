"""A sandbox without network for programs that a model wrote: bubblewrap, limits, a filter."""

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field

from rlx_plugins.code.system_calls import build_filter

_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # sets have one order, so that scores repeat
}
_SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc/alternatives")
_OPEN_FILES = 64
_STRANGER = 65534
"""The user of programs where rlx runs as root, for whom the kernel counts no processes."""
_TAIL = 500
_child_pid = re.compile(rb'"child-pid": (\d+)')


class SandboxError(RuntimeError):
    """The sandbox failed, not the program in it."""


class SandboxOptions(BaseModel):
    """The limits of a sandbox, and the start of programs in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_seconds: int = Field(2, ge=1, le=3600)
    """Processor time of each process, which is the same on a busy machine."""
    memory_mb: int = Field(256, ge=64, le=1 << 20)
    """MiB of address space of each process."""
    processes: int = Field(8, ge=2, le=4096)
    """Processes and threads at a time, with those that start the program."""
    output_kb: int = Field(256, ge=1, le=1 << 20)
    """KiB of an output or a file."""
    unsafe: bool = False
    """Whether code runs without a sandbox, as you: it can read and delete your files."""

    def check_sandbox(self) -> None:
        """Runs a program that does nothing; raises OSError if this machine has no sandbox."""
        try:
            with self.start_program(["true"]) as process:
                code = process.wait(60.0)
        except SandboxError as error:
            help_ = "install bubblewrap, or set `unsafe: true` to run code without a sandbox"
            raise OSError(f"no sandbox for the code of answers: {error}; {help_}") from error
        if code != 0:
            raise OSError(f"no program starts with these limits (exit code {code})")

    @contextmanager
    def start_program(
        self,
        command: Sequence[str],
        *,
        descriptors: Sequence[int] = (),
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.DEVNULL,
    ) -> Iterator["SandboxProcess"]:
        """Runs a program in the block; all of its processes end with the block.

        It inherits `descriptors` under the same numbers. Raises SandboxError if it does not start.
        """
        with ExitStack() as stack:
            stderr = stack.enter_context(tempfile.TemporaryFile())
            limited = [*self._build_limits(), *command]
            passed: list[int] = []
            status = unblock = folder = None
            if self.unsafe:
                temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
                folder = stack.enter_context(temporary)
            else:
                limited, passed, status, unblock = self._wrap(limited)
                stack.callback(os.close, status)
            try:
                process = subprocess.Popen(
                    limited,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(*descriptors, *passed),
                    env=_ENVIRONMENT,
                    cwd=folder,
                    start_new_session=True,
                )
            except OSError as error:
                if unblock is not None:
                    os.close(unblock)
                raise SandboxError(f"{limited[0]}: {error.strerror}") from error
            finally:
                for descriptor in passed:
                    os.close(descriptor)
            running = SandboxProcess(process, status, stderr)
            stack.callback(running.end)
            if unblock is not None:
                running.enter_users(unblock)
            yield running

    def _build_limits(self) -> list[str]:
        size = self.memory_mb << 20
        return [
            _find_tool("prlimit", "util-linux"),
            f"--as={size}",
            f"--nproc={self.processes}",
            f"--cpu={self.cpu_seconds}:{self.cpu_seconds + 1}",
            f"--fsize={self.output_kb << 10}",
            f"--nofile={_OPEN_FILES}",
            "--core=0",
        ]

    def _wrap(self, limited: list[str]) -> tuple[list[str], list[int], int, int | None]:
        """A command in bubblewrap, the descriptors to pass to it and to close here, where
        bubblewrap reports, and a pipe on which it waits until its users are known, if any."""
        status, theirs = os.pipe()
        rules = os.memfd_create("rlx")
        os.write(rules, build_filter())
        os.lseek(rules, 0, os.SEEK_SET)
        passed = [theirs, rules]
        arguments = ["--json-status-fd", str(theirs), "--seccomp", str(rules)]
        unblock = None
        if _is_root_of_machine():
            waits, unblock = os.pipe()
            passed += [waits, os.dup(theirs)]
            arguments += ["--userns-block-fd", str(waits), "--info-fd", str(passed[-1])]
            arguments += ["--cap-drop", "ALL"]
            arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
            leave_root = ["--reuid=1", "--regid=1", "--clear-groups", "--no-new-privs"]
            limited = [_find_tool("setpriv", "util-linux"), *leave_root, *limited]
        wrapper = [_find_tool("bwrap", "bubblewrap"), *self._build_view(), *arguments]
        return [*wrapper, "--", *limited], passed, status, unblock

    def _build_view(self) -> list[str]:
        view = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
        view += ["--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
        view += ["--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr"]
        view += ["--perms", "0755", "--dir", "/etc"]
        for name in _SYSTEM_FOLDERS:
            path = f"/{name}"
            if os.path.islink(path):  # noqa: PTH114
                view += ["--symlink", os.readlink(path), path]  # noqa: PTH115
            else:
                view += ["--ro-bind-try", path, path]
        view += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
        view += ["--proc", "/proc", "--dev", "/dev"]
        view += ["--perms", "1777", "--size", str(self.memory_mb << 20), "--tmpfs", "/tmp"]
        folder = Path(sys.base_prefix)
        if Path("/usr") not in (folder, *folder.parents):
            for above in reversed(folder.parents[:-1]):
                view += ["--perms", "0755", "--dir", str(above)]
            view += ["--ro-bind", str(folder), str(folder)]
        return [*view, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]


class SandboxProcess:
    """A program that runs in a sandbox."""

    def __init__(self, process: Any, status: int | None, stderr: IO[bytes]) -> None:
        self._process, self._status, self._stderr = process, status, stderr
        self._reported = b""

    def wait(self, seconds: float) -> int | None:
        """Waits for the end of the program; raises SandboxError if it never began. Returns its
        exit code, 128 and the number of a signal that ended it, or None if it still runs."""
        try:
            code: int = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        if self._status is not None:
            self._read_status(0.0, b"exit-code")
            if b"exit-code" not in self._reported:
                raise SandboxError(self._describe_failure(code))
        return code if code >= 0 else 128 - code

    def enter_users(self, unblock: int) -> None:
        """Gives the sandbox a user besides root; raises SandboxError if it cannot be done."""
        try:
            self._read_status(30.0, b"}")
            if (found := _child_pid.search(self._reported)) is None:
                raise SandboxError(self._describe_failure(self._process.wait(30.0)))
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{int(found[1])}/{kind}").write_text(
                    f"0 0 1\n1 {_STRANGER} 1\n", "ascii"
                )
            os.write(unblock, b"\n")
        except OSError as error:
            raise SandboxError(f"bubblewrap: {error}") from error
        finally:
            os.close(unblock)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read_status(self, seconds: float, wanted: bytes) -> None:
        assert self._status is not None
        until = time.monotonic() + seconds
        while wanted not in self._reported:
            left = max(0.0, until - time.monotonic())
            if not select.select([self._status], [], [], left)[0]:
                return
            if not (part := os.read(self._status, 4096)):
                return
            self._reported += part

    def _describe_failure(self, code: int) -> str:
        self._stderr.seek(0)
        said = self._stderr.read(_TAIL).decode(errors="replace").strip()
        return said or f"bubblewrap ended with exit code {code}"


def find_python() -> str:
    """The interpreter of rlx, without its packages."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@cache
def _find_tool(name: str, package: str) -> str:
    """The path of a program; raises SandboxError if it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise SandboxError(f"{name} is not installed (of the package {package})")
    return path


def _is_root_of_machine() -> bool:
    """Whether this user is root outside of all user namespaces, or may be."""
    if os.geteuid():
        return False
    first = Path("/proc/self/uid_map").read_text("ascii").split()
    return first[:2] == ["0", "0"]
