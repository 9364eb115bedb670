"""Experiments: read them from YAML, validate, plan and submit them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.api.runs import Run
from rlx.discovery import ExperimentPlugins
from rlx.launch import find_finished_runs, open_registry, registry_url, start_experiment
from rlx.plan import check_file, run_preflight_checks
from rlx.spec import ExperimentSpec
from rlx.spec.reading import Diagnostic, InvalidSpec, LoadedSpec, label_refusal

if TYPE_CHECKING:
    import pandas as pd

    from rlx.plan import PlanReport

__all__ = ["Experiment", "ExperimentPlan", "plan_experiment", "read", "submit", "validate"]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A valid experiment.

    Attributes:
        path: its file.
        loaded: its spec, with the place of every value.
        plugins: its plugins.
    """

    path: Path
    loaded: LoadedSpec
    plugins: ExperimentPlugins

    @property
    def spec(self) -> ExperimentSpec:
        """Every value, with defaults filled in."""
        return self.loaded.spec

    def plan(self) -> "ExperimentPlan":
        """Sends synthetic rollouts through the experiment's rewards, mask and estimator.

        Loads no model, and downloads nothing if `HF_HUB_OFFLINE=1` is set.
        """
        from rlx.plan import build_plan

        return ExperimentPlan(build_plan(self.path, self.loaded, self.plugins))

    @label_refusal("submitted")
    def submit(self, *, again: bool = False, queue: bool = False, rehearse: bool = True) -> Run:
        """Records a run and starts it in the background, where it outlives this process.

        Args:
            again: run even if the same spec and seed have finished or are active; otherwise that
                run is returned.
            queue: leave the run to an `rlx worker`.
            rehearse: first send synthetic rollouts through the experiment, as `plan` does.

        Raises:
            EnvironmentFault: this machine lacks what the experiment needs.
            InvalidSpec: the rehearsal finds an error, or the checkpoint to start from is missing
                or of another model.
        """
        url, read, plugins = registry_url(self.loaded), self.loaded, self.plugins
        (finished,) = [None] if again else find_finished_runs(url, [(read, plugins)])
        if finished is not None:
            return Run(finished.id, url)
        elsewhere = queue or self.spec.runner.launcher.submits_jobs
        run_preflight_checks(read, plugins, elsewhere=elsewhere)
        if rehearse:
            from rlx.plan import run_rehearsal_checks  # imports torch

            (warnings,) = run_rehearsal_checks([(read, plugins)], elsewhere=elsewhere)
            plugins = replace(plugins, warnings=plugins.warnings + warnings)
        with open_registry(url, read_only=False) as registry:
            run, _ = start_experiment(registry, read, plugins, again=again, queue=queue)
        return Run(run.id, url)


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """What an experiment does to every token of synthetic rollouts."""

    report: "PlanReport"

    @property
    def findings(self) -> tuple[Diagnostic, ...]:
        """Errors and warnings."""
        return self.report.findings

    def tokens(self) -> "pd.DataFrame":
        """One row per token: its author, rewards, advantage and weight in the loss.

        The columns are those of `Run.trajectories`, with `phase` in place of `step`.
        """
        from rlx.api.frames import build_token_frame

        return build_token_frame(
            ({"phase": ", ".join(phase.names)}, row)
            for phase in self.report.phases
            for row in phase.rows
        )


def read(path: Path | str, *overrides: str) -> Experiment:
    """Reads an experiment and checks it with its plugins.

    Args:
        path: a YAML file.
        overrides: `path.to.key=value`, as of `--set`.

    Raises:
        InvalidSpec: a `SpecError` that names every fault with its line.
        PluginError: a plugin is missing or broken.
        EnvironmentFault: this machine lacks files or packages that a plugin reads.
    """
    return Experiment(Path(path), *check_file(Path(path), overrides))


def validate(path: Path | str, *overrides: str) -> tuple[Diagnostic, ...]:
    """Returns every error and warning of an experiment's file; empty if it is flawless.

    Args:
        path: a YAML file.
        overrides: `path.to.key=value`, as of `--set`.

    Raises:
        SpecError: the file cannot be read.
    """
    try:
        return read(path, *overrides).plugins.warnings
    except InvalidSpec as error:
        return error.diagnostics


def plan_experiment(path: Path | str, *overrides: str) -> ExperimentPlan:
    """Reads an experiment and returns its plan; see `read` and `Experiment.plan`."""
    return read(path, *overrides).plan()


def submit(
    path: Path | str,
    *overrides: str,
    again: bool = False,
    queue: bool = False,
    rehearse: bool = True,
) -> Run:
    """Reads an experiment and starts it; see `read` and `Experiment.submit`."""
    return read(path, *overrides).submit(again=again, queue=queue, rehearse=rehearse)
