"""Runs: what they have recorded, as pandas frames, and how to wait for them and stop them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx.assess import load_step_accounts, select_rollout_steps
from rlx.errors import EnvironmentFault, PluginError, RegistryError, RlxError, SpecError
from rlx.launch import (
    get_registry_url,
    get_run_exit_code,
    open_registry,
    reconcile_job,
    stop_run,
    watch_run,
)
from rlx.reporting import log_report
from rlx_registry import RunRecord

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run", "list_runs", "open_run"]

KINDS = (SpecError, PluginError, EnvironmentFault, RegistryError)


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run; each call reads what is recorded now.

    Attributes:
        id: such as `r-0001`.
        registry: URL of its registry.
    """

    id: str
    registry: str

    @property
    def record(self) -> RunRecord:
        """What the registry knows of the run: spec, seed, step, folder, times, ..."""
        with open_registry(self.registry) as registry:
            return reconcile_job(registry, registry.run(self.id))

    @property
    def status(self) -> str:
        """`queued`, `submitted`, `running`, `finished`, `failed`, `stopped` or `lost`."""
        return self.record.effective_status

    def wait(self, timeout: float | None = None) -> "Run":
        """Waits until the run has finished, and returns it.

        Args:
            timeout: longest wait, in seconds; None waits as long as the run takes.

        Raises:
            RlxError: the run failed, was stopped or is lost; the kind of error is the one that
                the run ended with.
            TimeoutError: the run has not ended in time; it goes on.
        """
        record = watch_run(self.id, self.registry, timeout=timeout)
        with open_registry(self.registry) as registry:
            code = get_run_exit_code(registry, record) or 0
        if code:
            kind = next((kind for kind in KINDS if kind.exit_code == code), RlxError)
            raise kind(f"{self.id} {record.effective_status}: {record.reason}")
        return self

    def stop(self) -> None:
        """Stops the run between two steps, with a checkpoint; a second call stops it at once.

        Raises:
            SpecError: the run is not running.
        """
        with open_registry(self.registry, read_only=False) as registry:
            stop_run(registry, self.id, report=log_report)

    def metrics(self, *names: str) -> "pd.DataFrame":
        """One row per step, one column per metric, such as `train/kl`.

        Args:
            names: the metrics; without any, all.
        """
        from rlx.api.frames import build_metric_frame

        with open_registry(self.registry) as registry:
            found = registry.results.metrics(self.id, names or None)
        if missing := [name for name in names if name not in found]:
            raise SpecError(f"{self.id} has no metric {missing[0]!r}")
        return build_metric_frame({name: found[name] for name in names or found})

    def evaluations(self) -> "pd.DataFrame":
        """One row per evaluation and probe: `step`, `label`, `suite`, and its metrics."""
        from rlx.api.frames import build_evaluation_frame

        with open_registry(self.registry) as registry:
            return build_evaluation_frame(registry.results.evaluations(self.id))

    def answers(self, suite: str = "held_out", label: str = "after") -> "pd.DataFrame":
        """One row per answer of an evaluation: problem, stratum, correctness, stated confidence.

        Args:
            suite: name of the evaluated set, as in `evaluations`.
            label: `before` or `after` training, or `step`; the newest such evaluation is taken.

        Raises:
            SpecError: there is no such evaluation, or its answers are not recorded.
        """
        from rlx.api.frames import build_answer_frame

        with open_registry(self.registry) as registry:
            there = registry.results.evaluations(self.id, suite)
        found = [one for one in there if (one.suite, one.label) == (suite, label)]
        if not found or found[-1].payload is None:
            raise SpecError(f"{self.id} has no recorded answers of {suite!r}, {label!r}")
        return build_answer_frame(found[-1].payload)

    def rollouts(self, *steps: int) -> "pd.DataFrame":
        """One row per trained turn: problem, raw rewards, advantage, length, the text's beginning.

        Args:
            steps: training steps; without any, all that are stored.

        Raises:
            SpecError: the run has stored no rollouts of such a step.
        """
        from rlx.api.frames import build_rollout_frame

        with open_registry(self.registry) as registry:
            wanted = select_rollout_steps(registry, registry.run(self.id), steps)
            index = {step: registry.results.rollout_index(self.id, step) for step in wanted}
        return build_rollout_frame(index)

    def trajectories(self, *steps: int) -> "pd.DataFrame":
        """One row per token of the trained rows: text, author, mask, rewards, advantage, weight.

        Args:
            steps: training steps; without any, the newest that is stored.

        Raises:
            SpecError: the run has stored no rollouts of such a step.
            RegistryError: a file is missing, or another version of rlx wrote it.
        """
        from rlx.api.frames import build_token_frame

        with open_registry(self.registry) as registry:
            run = registry.run(self.id)
            wanted = select_rollout_steps(registry, run, steps)
            bodies = {
                step: registry.results.rollout_body(run.id, step)
                for step in (wanted if steps else wanted[-1:])
            }
            return build_token_frame(
                ({"step": step}, row)
                for step, body in bodies.items()
                for row in load_step_accounts(run, body).rows
            )


def open_run(name: str = "latest", *, registry: str | None = None) -> Run:
    """Opens a recorded run.

    Args:
        name: its id, its number, or `latest`.
        registry: URL of the registry; None takes that of the command line: `RLX_REGISTRY`, or the
            one in `RLX_HOME`.

    Raises:
        SpecError: there is no such run.
    """
    url = get_registry_url(registry)
    with open_registry(url) as opened:
        return Run(opened.run(name).id, url)


def list_runs(
    *, name: str | None = None, group: str | None = None, registry: str | None = None
) -> list[Run]:
    """Lists runs, newest first.

    Args:
        name: only runs of this experiment.
        group: only runs of this group.
        registry: URL of the registry, as in `open_run`.
    """
    url = get_registry_url(registry)
    with open_registry(url) as opened:
        return [Run(run.id, url) for run in opened.runs(name=name, group=group)]
