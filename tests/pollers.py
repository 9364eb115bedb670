"""A run that writes as fast as it can, and clients of a dashboard that poll it meanwhile."""

import contextlib
import gzip
import http.client
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dashboards import Dashboard
from patience import LIMIT
from submissions import submit

__all__ = ["Pollers", "Stretch", "polling", "writing"]

EVERY = 5.0
"""Seconds between two looks of a page."""
METRICS = 60
ROWS, TOKENS = 64, 20


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a writer did in a while.

    Attributes:
        seconds: of every write by the clock: a step, an event or a sign of life.
        said: what the run's log would have; "waiting for the registry" is a lock that was held.
    """

    steps: int
    seconds: list[float]
    said: str


class Writer:
    """A run in another process."""

    def __init__(self, pipe: "Connection[Any, Any]", run: str) -> None:
        self._pipe, self.run = pipe, run

    def write(self, seconds: float) -> Stretch:
        """Has the run write as fast as it can for a while."""
        self._pipe.send(seconds)
        return self._pipe.recv()  # type: ignore[no-any-return]


@contextmanager
def writing(url: str, folder: Path) -> Iterator[Writer]:
    """Starts a run of its own process, which waits for orders."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_write, args=(url, folder, theirs))
    process.start()
    theirs.close()
    try:
        yield Writer(ours, ours.recv())
        ours.send(None)
        process.join(LIMIT)
        assert process.exitcode == 0
    finally:
        ours.close()
        process.kill()
        process.join(LIMIT)


def _write(url: str, folder: Path, pipe: "Connection[Any, Any]") -> None:
    import numpy as np
    from sampled import pieces, sampled
    from sqlalchemy import event

    from rlx.record.recorder import Recorder
    from rlx_registry import Registry

    with Registry.open(url) as registry:
        # Who meets a lock is refused at once, and says so: waiting is seen however short it is.
        event.listen(registry.database._writer, "connect", _impatient)
        run = submit(registry, digest="d" * 64, name="full-speed")
        (folder / "rollouts").mkdir(parents=True)
        registry.update_run(run.id, directory=folder, steps_total=10**6)
        started = registry.start(run.id, ["submitted"])
        assert started is not None
        writer = registry.as_writer(run.id, started.attempt)
        recorder = Recorder(writer, run.id, keep_bodies=True)
        recorded = sampled(ROWS, TOKENS, np.random.default_rng(0))
        pipe.send(run.id)
        step = 0

        def timed(write: Callable[..., object], *arguments: Any, **named: Any) -> None:
            began = time.monotonic()
            write(*arguments, **named)
            took.append(time.monotonic() - began)

        while (seconds := pipe.recv()) is not None:
            first, took, said = step, [], io.StringIO()
            end = time.monotonic() + seconds
            with contextlib.redirect_stdout(said):
                while time.monotonic() < end:
                    step += 1
                    told = (step, _figures(step), *recorded, {"phase": "p"})
                    path = folder / "rollouts" / f"step_{step:06d}.parquet"
                    timed(recorder.step, *told, path, pieces=pieces)
                    timed(recorder.event, "step", f"step {step}")
                    timed(writer.heartbeat, run.id)
            pipe.send(Stretch(step - first, took, said.getvalue()))


def _impatient(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA busy_timeout=0")


def _figures(step: int) -> dict[str, float]:
    return {f"train/m{i}": i + step / 7 for i in range(METRICS)}


@dataclass(slots=True)
class Pollers:
    """Clients that look at a run and at all runs, as pages that are open do.

    Attributes:
        every: seconds between two looks of one client.
        seconds: of every answer.
        wrong: whatever was no answer.
    """

    served: Dashboard
    run: str
    every: float = EVERY
    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    points: int = 0
    wrong: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def look(self, delay: float) -> None:
        """One client: begins after a while, and asks again and again until all is over."""
        after = event = 0
        wait = delay
        while not self.over.wait(wait):
            began = time.monotonic()
            news = self._ask(f"/runs/{self.run}/live.json?after={after}&event={event}")
            self._ask("/live.json")
            if news:
                after, self.points = (
                    news["seq"],
                    self.points + sum(map(len, news["points"].values())),
                )
                event = news["events"][-1]["id"] if news["events"] else event
            wait = max(0.0, self.every - (time.monotonic() - began))

    def _ask(self, path: str) -> dict[str, Any] | None:
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.served.port, timeout=LIMIT)
        try:
            connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
            response = connection.getresponse()
            content = response.read()
        except OSError as error:
            self.wrong.append(f"{path}: {error}")
            return None
        finally:
            connection.close()
        if response.status != 200:
            self.wrong.append(f"{path}: {response.status}")
            return None
        self.seconds.append(time.monotonic() - began)
        self.bytes += len(content)
        if response.getheader("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        return json.loads(content)  # type: ignore[no-any-return]


@contextmanager
def polling(
    served: Dashboard, run: str, clients: int = 20, every: float = EVERY
) -> Iterator[Pollers]:
    """Lets clients poll, evenly spread over the time between two looks."""
    pollers = Pollers(served, run, every)
    threads = [
        threading.Thread(target=pollers.look, args=(every * number / clients,))
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    try:
        yield pollers
    finally:
        pollers.over.set()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a client still waits for an answer"
