"""Write a run's results to the registry during training.

A step is written by a thread while the next one is sampled. Every other write waits for it, so the
registry has a run's results in their order, and no checkpoint of a step that is not recorded.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlx.probe import GRID, ProbeResult, RecordedProbe
from rlx.record.rollouts import Role, TrainedRows, probe_table, rollout_index, rollout_table
from rlx.record.tracker import retry_registry_call
from rlx.reward import RewardTable
from rlx.rollout import Pieces, RolloutTree
from rlx_registry import Registry, write_body


class Recorder:
    """The only writer of a run's results. What fails to write a step is raised by the next call.

    Args:
        keep_bodies: whether to store rollouts and their index; otherwise only metrics are stored.
        every, last: those of step 1, of every `every`-th step from there, and of step `last`.
    """

    def __init__(
        self,
        registry: Registry,
        run_id: str,
        *,
        keep_bodies: bool,
        every: int = 1,
        last: int | None = None,
    ) -> None:
        self._registry = registry
        self._run_id = run_id
        self._keep_bodies = keep_bodies
        self._every, self._last = every, last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._step: Future[None] | None = None
        self._clock: int | None = None

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds so far of the thread that writes steps."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def step(
        self,
        step: int,
        figures: Mapping[str, float],
        trees: Sequence[RolloutTree],
        table: RewardTable,
        rows: TrainedRows,
        statistics: Mapping[str, Any],
        path: Any,
        roles: Sequence[Role] | None = None,
        *,
        pieces: Pieces,
    ) -> None:
        """Begins to record one training step, its body first, and how long that took.

        Args:
            trees, table, rows, roles: see `rollout_table`.
            statistics: further inputs needed to recompute the step, as plain JSON, including
                `phase`, `beta`, `state` (the estimator's, after the step) and `max_tokens`.
            path: path of the body.
        """

        def write_rows(body: Mapping[str, Any] | None) -> None:
            registry, run_id = self._registry, self._run_id
            with registry.write_atomically():  # the disk may be full after any write
                if body is not None:
                    registry.results.add_rollouts(run_id, step, **body)
                registry.results.add_metrics(run_id, step, figures)
                registry.update_run(run_id, step=step)

        def write() -> None:
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            began, used = time.perf_counter(), self.cpu_seconds
            body: dict[str, Any] | None = None
            if self._keep_bodies and ((step - 1) % self._every == 0 or step == self._last):
                sha256, size = write_body(path, rollout_table(trees, table, rows, roles, pieces))
                body = {"path": path, "sha256": sha256, "bytes": size, "statistics": statistics}
                body["index"] = rollout_index(trees, table, rows)
            retry_registry_call(lambda: write_rows(body))
            seconds = {
                "perf/record_s": time.perf_counter() - began,
                "perf/cpu_record_s": self.cpu_seconds - used,
            }
            retry_registry_call(
                lambda: self._registry.results.add_metrics(self._run_id, step, seconds)
            )

        self.finish_step()
        self._step = self._thread.submit(write)

    def finish_step(self) -> None:
        """Waits until the newest step is recorded, and raises what failed."""
        step, self._step = self._step, None
        if step is not None:
            step.result()

    def probe(
        self, records: Sequence[RecordedProbe], samples: ProbeResult, label: str, path: Path
    ) -> None:
        """Records a probe: its samples as a body, the figures of each scheme, and its metrics; of
        each scheme, at least one, there is a record, all of the same step."""
        results, step = self._registry.results, records[0].step
        sha256, _ = write_body(path, probe_table(samples))
        self._put(results.add_artifact, path, "probe")
        body = {"body": {"path": f"probes/{path.name}", "sha256": sha256}}
        metrics: dict[str, float] = {}
        for one in records:
            figures, at = one.figures, f"probe/{one.suite}"
            self._put(results.add_evaluation, step, label, at, figures["problems"], figures, body)
            for share, band in zip(GRID, figures["p_correct"], strict=True):
                metrics[f"{at}/mc_p_correct_{round(100 * share):03d}"] = band["mean"]
            if figures["aoc"]["mean"] is not None:  # a whole response has an answer to compare with
                metrics[f"{at}/aoc"] = figures["aoc"]["mean"]
            metrics |= {f"{at}/{name}": figures[name] for name in ("accuracy", "wrapped")}
        self._put(results.add_metrics, step, metrics)

    def evaluation(
        self,
        step: int,
        label: str,
        metrics: Mapping[str, Any],
        payload: Mapping[str, Any],
        suite: str = "held_out",
    ) -> None:
        """Records an evaluation on one set, and its main figures as metrics."""
        results = self._registry.results
        self._put(results.add_evaluation, step, label, suite, metrics["n"], metrics, payload)
        curves = ("accuracy", "brier", "ece", "auroc", "mean_confidence", "alike_share")
        values = {f"eval/{suite}/{name}": metrics.get(name) for name in curves}
        self._put(results.add_metrics, step, {n: v for n, v in values.items() if v is not None})

    def checkpoint(self, step: int, path: Path, sha256: str, size: int) -> None:
        """Records a checkpoint that is complete on disk."""
        self._put(self._registry.results.add_checkpoint, step, path, size, sha256)

    def list_checkpoint_digests(self) -> dict[int, str]:
        """Digests of the recorded checkpoints, by step."""
        self.finish_step()
        return retry_registry_call(
            lambda: {c.step: c.sha256 for c in self._registry.results.checkpoints(self._run_id)}
        )

    def record_durations(self, step: int, seconds: Mapping[str, float]) -> None:
        """Records how long a part of a step took, which is only known afterwards."""
        self._put(self._registry.results.add_metrics, step, seconds)

    def warm_start(self, losses: Mapping[int, float], total: int) -> None:
        """Records losses of the warm start, at the numbers of its steps, and how far it is."""

        def write() -> None:
            with self._registry.write_atomically():
                for done, loss in losses.items():
                    values = {"warm_start/loss": loss}
                    self._registry.results.add_metrics(self._run_id, done, values)
                self._registry.update_run(self._run_id, phase=f"warm start {max(losses)}/{total}")

        self.finish_step()
        retry_registry_call(write)

    def phase(self, name: str) -> None:
        """Records that a phase has begun."""
        self._put(self._registry.update_run, phase=name)

    def event(self, kind: str, message: str, level: str = "info", **payload: Any) -> None:
        """Records an event."""
        self._put(self._registry.results.add_event, kind, message, payload or None, level=level)

    def announce(self, kind: str, message: str, level: str = "warning", **payload: Any) -> None:
        """Records an event and prints its message."""
        self.event(kind, message, level, **payload)
        print(message, flush=True)

    def _put(self, write: Callable[..., None], *arguments: Any, **named: Any) -> None:
        self.finish_step()
        retry_registry_call(lambda: write(self._run_id, *arguments, **named))
