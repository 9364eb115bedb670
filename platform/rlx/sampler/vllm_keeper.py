"""Keeps the servers of a machine's pool: starts them, sends them weights, replaces those that end.

The first rank of a machine does this. A thread for each server waits for its end.
"""

import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import IO, Any

import psutil
import torch

from rlx.errors import EnvironmentFault, RlxError
from rlx.sampler.server_pool import ADAPT, LOAD
from rlx.sampler.transfer import PublishedWeights
from rlx.sampler.vllm_process import LEAVING, WorkerGone, WorkerProcess, WorkerRefusal
from rlx.text import escape_unprintable

__all__ = ["FAILURE", "PoolKeeper", "get_socket", "print_line", "require_short_path"]

MOST = 2
"""Replacements of one server between two sets of weights; after one more end, the run ends too."""
LAST = 3
"""Different lines of a server's output that are repeated when it ends."""
LONGEST = 200
"""Characters of each of these lines."""
SOCKET_PATH = 107
"""Maximum length of a socket's path on Linux, in bytes."""
MANY = 64
"""The largest number of servers that `rlx.spec.SamplerPoolSpec` allows."""
FAILURE = "failure"
"""File of a pool's folder that says why it has ended, for the ranks that ask its servers."""
DOING = {LOAD: "take the learner's weights", ADAPT: "take the learner's adapter"}

_Published = tuple[int, PublishedWeights]
"""Weights and their number."""


def get_socket(place: Path, number: int) -> Path:
    """The path at which a server of the pool in a folder listens."""
    return place / f"{number}.socket"


def print_line(line: str) -> None:
    """Prints a line to standard error at once."""
    print(line, file=sys.stderr, flush=True)


def require_short_path(place: Path) -> None:
    """Checks that servers of a pool in a folder can listen there.

    Raises:
        EnvironmentFault: the path is too long.
    """
    if (over := len(os.fsencode(get_socket(place, MANY))) - SOCKET_PATH) > 0:
        raise EnvironmentFault(
            f"sampler.pool needs sockets in the temporary folder, whose path is {over} characters "
            "too long: set TMPDIR to a shorter one"
        )


class PoolKeeper:
    """The servers of a pool; they start meanwhile.

    Args:
        place: the pool's folder, which exists and holds the files of the model.
        settings: of every server, as for `rlx.sampler.vllm_worker.VllmWorker`.
        environments: environment variables of each server.
        device: device of the rank.
        report: called with every line about a server; by default, prints it.
        first: number of the first server.

    Attributes:
        refusal: why vLLM takes no adapters of this model; None if it does, or is not asked to.
    """

    def __init__(
        self,
        place: Path,
        settings: Mapping[str, Any],
        environments: Sequence[Mapping[str, str]],
        device: torch.device,
        report: Callable[[str], None] = print_line,
        first: int = 0,
    ) -> None:
        self.refusal: str | None = None
        self._report = report
        self._place, self._device = place, device
        self._settings = dict(settings)
        self._published: dict[str, _Published] = {}
        self._failure: RlxError | None = None
        self._closing = False
        self._servers = [_Server(n, own, report) for n, own in enumerate(environments, first)]
        self._threads = [
            Thread(target=self._keep, args=(server,), daemon=True) for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def await_start(self) -> None:
        """Waits until all servers are up.

        Raises:
            RlxError: one cannot start, or the pool was closed meanwhile.
        """
        for server in self._servers:
            server.is_up.wait()
        self._require_health()
        if self._closing:
            raise RlxError("the pool of vLLM servers was closed while they started")

    @property
    def restarts(self) -> int:
        """How often servers were replaced."""
        return sum(server.restarts for server in self._servers)

    def publish(self, kind: str, version: int, weights: PublishedWeights) -> None:
        """Sends weights to all servers; of those of a model drops an adapter that was sent before.

        Args:
            kind: `LOAD` or `ADAPT`.
            version: their number, which requests name.

        Raises:
            RlxError: a server rejects them, or the pool has failed.
        """
        kept = {} if kind == LOAD else self._published
        published = {**kept, kind: (version, weights)}
        before, self._published = self._published, published
        with ThreadPoolExecutor(len(self._servers)) as threads:
            list(threads.map(lambda server: self._send(server, kind), self._servers))
        for one in before.values():
            if one not in published.values():
                one[1].close()
        self._require_health()

    def _send(self, server: "_Server", ask: str) -> None:
        """Sends a server what was published; one that is gone gets it when it is replaced, and one
        that rejects it is not replaced."""
        with server.lock:
            server.ends = 0
            try:
                with suppress(WorkerGone):
                    _send_weights(server, ask, *self._published[ask])
            except RlxError as error:
                self._fail(error)

    def close(self) -> None:
        """Stops all servers."""
        self._closing = True
        for server, thread in zip(self._servers, self._threads, strict=True):
            if server.lock.acquire(timeout=1):
                if server.process is not None:
                    server.process.close()
                server.lock.release()
                thread.join(LEAVING)
            while thread.is_alive():  # the server starts, or loads
                server.kill()
                thread.join(0.1)
        for _, weights in self._published.values():
            weights.close()

    def _keep(self, server: "_Server") -> None:
        """Starts a server, and again whenever it has ended."""
        try:
            while not (self._closing or self._failure):
                with server.lock:
                    self._start(server)
                server.is_up.set()
                how = server.wait()
                with server.lock:  # whoever sends it weights reads its last answer first
                    server.get_process().close()
                if not (self._closing or self._failure):
                    self._count_end(server, how)
        except RlxError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  (ranks would wait for the server)
            traceback.print_exc()
            self._fail(RlxError(f"vLLM server {server.number} cannot be started: {error}"))
        finally:
            server.is_up.set()

    def _count_end(self, server: "_Server", how: str) -> None:
        """Says that a server has ended.

        Raises:
            RlxError: it has ended too often.
        """
        server.ends += 1
        if server.ends > MOST:
            raise RlxError(
                f"{how}; it has ended {server.ends} times since the last weights arrived: if it "
                "ran out of memory, lower sampler.max_rows, sampler.pool.gpu_memory_utilization "
                "(on a GPU) or sampler.kv_cache_mb (on the CPU)"
            )
        server.restarts += 1
        self._report(f"{how}; starting another in its place")

    def _start(self, server: "_Server") -> None:
        """Starts a server and sends it the current weights; without adapters if vLLM refuses them
        when it is started for the first time."""
        settings = self._settings
        try:
            self._boot(server)
        except WorkerRefusal as refusal:
            if settings["adapter"] is None:
                raise
            self.refusal, self._settings = refusal.why, {**settings, "adapter": None}
            self._boot(server)

    def _boot(self, server: "_Server") -> None:
        """Starts a server, and again if it is killed before it is up for the first time."""
        while not self._try_to_boot(server):
            pass

    def _try_to_boot(self, server: "_Server") -> bool:
        """Starts a server; returns False if it was killed before it was up for the first time."""
        server.start(self._place, self._device)
        where = {"folder": str(self._place), "socket": str(get_socket(self._place, server.number))}
        try:
            server.get_process().ask({**self._settings, **where}, "start with this model")
            for ask, published in self._published.items():
                _send_weights(server, ask, *published)
        except (WorkerGone, WorkerRefusal) as end:
            if server.is_up.is_set() or self._closing:
                return True  # it counts as any other end
            if isinstance(end, WorkerRefusal):
                raise
            how = f"{server.wait()} before it could start"
            if not server.was_killed:
                raise RlxError(how) from end
            self._count_end(server, how)
            return False
        return True

    def _fail(self, error: RlxError) -> None:
        """Says to all ranks why the pool has ended."""
        self._failure = error
        unfinished = self._place / f"{FAILURE}.part"
        with suppress(OSError):  # the folder was removed
            unfinished.write_text(str(error))
            unfinished.replace(self._place / FAILURE)

    def _require_health(self) -> None:
        if self._failure is not None:
            raise self._failure


def _send_weights(server: "_Server", ask: str, version: int, weights: PublishedWeights) -> None:
    """Sends weights to a server."""
    server.get_process().ask({"ask": ask, "version": version}, DOING[ask], weights)


class _Server:
    """One server of a pool, whichever process it is.

    Attributes:
        ends: how often it has ended since the last weights.
        restarts: how often it was replaced.
        is_up: set when it has been started for the first time, or could not be.
        lock: held while its process is replaced, or gets weights.
    """

    def __init__(
        self, number: int, environment: Mapping[str, str], report: Callable[[str], None]
    ) -> None:
        self.number, self.ends, self.restarts = number, 0, 0
        self._report = report
        self.process: WorkerProcess | None = None
        self.is_up, self.lock = Event(), Lock()
        self._environment = environment
        self._words: deque[str] = deque(maxlen=LAST)
        self._reader: Thread | None = None

    def start(self, place: Path, device: torch.device) -> None:
        """Starts its process."""
        own = place / f"s{self.number}"  # short: vLLM has sockets in it
        own.mkdir(mode=0o700, exist_ok=True)
        environment = {**self._environment, "TMPDIR": str(own)}
        self.process = WorkerProcess(environment, [own], device, apart=True)
        self._words.clear()
        self._reader = Thread(target=self._copy_output, args=(self.process.output,), daemon=True)
        self._reader.start()

    def get_process(self) -> WorkerProcess:
        """Its process."""
        assert self.process is not None
        return self.process

    def wait(self) -> str:
        """Waits for the end of its process, and of those that this one has started; says how it
        ended, with its last words."""
        process = self.get_process()
        code = process.wait()
        assert self._reader is not None
        self._reader.join(LEAVING)  # the others notice, and end
        if self._reader.is_alive():
            self.kill()
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        words = f' (its last words: "{" / ".join(self._words)}")' if self._words else ""
        return f"vLLM server {self.number}, process {process.pid}, {how}{words}"

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended its process."""
        return self.get_process().wait() < 0

    def kill(self) -> None:
        """Kills its process and those that this one has started, but not the one that removes what
        they leave in shared memory."""
        for process in psutil.process_iter() if self.process else ():
            with suppress(psutil.Error, ProcessLookupError):
                is_ours = self.process and os.getpgid(process.pid) == self.process.pid
                if is_ours and not any("resource_tracker" in word for word in process.cmdline()):
                    process.kill()

    def _copy_output(self, output: IO[bytes]) -> None:
        """Reports its output, with its name."""
        with output:
            for line in output:
                words = escape_unprintable(line.decode(errors="replace").rstrip())
                if (end := words[:LONGEST]) not in self._words:
                    self._words.append(end)
                self._report(f"vLLM server {self.number}: {words}")
