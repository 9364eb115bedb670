"""The way in from Python: experiments, runs as pandas frames, and results over runs."""

import json
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.discovery import (
    ExperimentPlugins,
    describe_plugin_changes,
    resolve_plugins,
)
from rlx.errors import EnvironmentFault, PluginError, RegistryError, RlxError, SpecError
from rlx.importing import speed_up_imports
from rlx.launch import (
    BROKEN_OFF,
    continue_run,
    find_finished_runs,
    get_registry_url,
    get_run_exit_code,
    is_abandoned,
    is_spec_of_run,
    locate_run_folder,
    open_registry,
    reconcile_job,
    registry_url,
    require_same_data,
    start_experiment,
    stop_run,
    watch_run,
)
from rlx.plan import check_file, run_preflight_checks
from rlx.plugin_files import keep_plugin_source
from rlx.progress import Progress, Report, log_report
from rlx.record import update_trackers
from rlx.results import (
    Comparison,
    compare_recipes,
    load_step_accounts,
    select_rollout_steps,
)
from rlx.reward import build_reward, open_response_lines, score_lines
from rlx.spec import ExperimentSpec
from rlx.spec.reading import Diagnostic, InvalidSpec, LoadedSpec, label_refusal
from rlx.text import escape_unprintable
from rlx_registry import RunRecord

if TYPE_CHECKING:
    import pandas as pd

    from rlx.plan import PlanReport, RowAccount
    from rlx.results import AuditReport


def _spread_fields(record: dict[str, Any], *names: str) -> dict[str, Any]:
    """Replaces mappings of a record by their values, as `field/key`."""
    for name in names:
        record |= {f"{name}/{key}": value for key, value in record.pop(name).items()}
    return record


def _build_frame(records: Iterable[Mapping[str, Any]]) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(records)


def _build_token_frame(rows: "Iterable[tuple[Mapping[str, Any], RowAccount]]") -> "pd.DataFrame":
    """One row per token: the columns that come first, the fields of its row, then those of
    `rlx.plan.row_accounts.TokenLine`, with `placed/NAME` for a reward that is placed on it or 0."""
    frame = _build_frame(
        {
            **first,
            **{name: getattr(row, name) for name in ("row", "tree", "group", "kind")},
            **_spread_fields(asdict(token), "placed"),
        }
        for first, row in rows
        for token in row.tokens
    )
    placed = [name for name in frame.columns if name.startswith("placed/")]
    return frame.fillna(dict.fromkeys(placed, 0.0))


KINDS = (SpecError, PluginError, EnvironmentFault, RegistryError)


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run; each call reads what is recorded now.

    Attributes:
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
        """Waits until the run has finished, and returns it; a notebook shows its progress.

        Args:
            timeout: longest wait, in seconds; None waits as long as the run takes.

        Raises:
            RlxError: the run failed, was stopped or is lost; the kind of error is the one that
                the run ended with.
            TimeoutError: the run has not ended in time; it goes on.
        """
        with _open_bar() as show:
            record = watch_run(self.id, self.registry, timeout=timeout, show=show)
        with open_registry(self.registry) as registry:
            code = get_run_exit_code(registry, record) or 0
        if code:
            kind = next((kind for kind in KINDS if kind.exit_code == code), RlxError)
            raise kind(f"{self.id} {record.effective_status}: {record.reason}")
        return self

    def stop(self) -> None:
        """Stops the run between two steps, with a checkpoint; a second call stops it at once."""
        with open_registry(self.registry, read_only=False) as registry:
            stop_run(registry, self.id, report=log_report)

    @label_refusal("resumed")
    def resume(self, *overrides: str, report: Report = log_report) -> "Run":
        """Continues the run in the background from its newest checkpoint, and returns it.

        Args:
            overrides: `path.to.key=value` of `runner` and `tracking`.
            report: gets warnings of plugins that have changed.

        Raises:
            SpecError: the run has not ended early, its data have changed, or the overrides would
                make it another experiment.
        """
        found = self.record
        if found.directory is None:
            raise SpecError(f"{self.id} never began: {BROKEN_OFF}; submit its experiment again")
        resumable = found.effective_status in ("failed", "stopped", "lost", "queued")
        if not resumable and not is_abandoned(found):
            if found.status in ("submitted", "running"):
                where = "" if found.host is None else f" on {found.host}"
                owner = f"process {found.pid}{where}"
                raise SpecError(f"{self.id} still has a supervisor, {owner}: rlx stop {self.id}")
            raise SpecError(f"{self.id} is {found.effective_status}: nothing to resume")
        spec = _build_resumed_spec(found, overrides) if overrides else None
        require_same_data(found)
        # What keeps plugins from working is the run's to say.
        with suppress(RlxError, ValueError):
            plugins = resolve_plugins(ExperimentSpec.from_record(found.spec))
            notes = describe_plugin_changes(plugins.list_records(), found.plugins)
            for note in dict.fromkeys(notes):
                report(f"warning: {escape_unprintable(note)}", err=True)
        with open_registry(self.registry, read_only=False) as registry:
            if not continue_run(registry, found, self.registry, spec):
                raise RlxError(f"{self.id} has just changed: try again")
        return self

    def export(
        self,
        folder: Path | str,
        *,
        step: int | None = None,
        card: bool = False,
        with_data: bool = False,
    ) -> Path:
        """Writes the run's model to a new folder, in the Hugging Face layout; returns the folder.

        Args:
            step: of the checkpoint; None takes the newest, or the trained model.
            card: also write a card, with the experiment and its figures.
            with_data: with a card: copy the task's data files too.
        """
        if with_data and not card:
            raise SpecError("with_data belongs to card")
        from rlx.results import export_model, write_card  # imports torch

        at, target = None if step is None else str(step), Path(folder)
        with open_registry(self.registry) as registry:
            found = registry.run(self.id)
            written = export_model(registry, found, target, at)
            if card:
                write_card(registry, found, written, target, with_data=with_data)
        return target

    def check(self, step: int | None = None) -> "AuditReport":
        """Computes scores, masks, rewards and advantages again from the records of a step, or of
        all that are stored."""
        from rlx.results import check_run  # imports torch

        with open_registry(self.registry) as registry:
            return check_run(registry, registry.run(self.id), step)

    def plot(self) -> "Pictures":
        """Draws what is recorded so far, calibration, curves and probes, into the run's folder, and
        sends the files to the trackers of a run that has ended."""
        from rlx.run import draw_run_pictures  # imports scipy

        folder = locate_run_folder(self.record)
        with open_registry(self.registry, read_only=False) as registry:
            drawn = draw_run_pictures(registry, self.id, folder)
            if drawn:
                update_trackers(registry, registry.run(self.id))
        return Pictures(tuple(drawn))

    def metrics(self, *names: str) -> "pd.DataFrame":
        """One row per step, one column per metric, such as `train/kl`; without names, all."""
        import pandas as pd

        with open_registry(self.registry) as registry:
            found = registry.results.metrics(self.id, names or None)
        if missing := [name for name in names if name not in found]:
            raise SpecError(f"{self.id} has no metric {missing[0]!r}")
        series = {n: pd.Series(dict(found[n]), dtype=float) for n in names or found}
        return pd.DataFrame(series).sort_index().rename_axis("step")

    def evaluations(self) -> "pd.DataFrame":
        """One row per evaluation and probe: `step`, `label`, `suite`, and its plain metrics."""
        with open_registry(self.registry) as registry:
            found = registry.results.evaluations(self.id)
        return _build_frame(
            {
                "step": one.step,
                "label": one.label,
                "suite": one.suite,
                **{k: v for k, v in one.metrics.items() if isinstance(v, int | float)},
            }
            for one in found
        )

    def answers(self, suite: str = "held_out", label: str = "after") -> "pd.DataFrame":
        """One row per answer: `problem_ids`, `strata`, `correct`, `confidence` (NaN if unreadable).

        Args:
            suite: name of the evaluated set, as in `evaluations`.
            label: `before` or `after` training, or `step`; the newest such evaluation is taken.
        """
        import pandas as pd

        with open_registry(self.registry) as registry:
            there = registry.results.evaluations(self.id, suite)
        found = [one for one in there if (one.suite, one.label) == (suite, label)]
        if not found or found[-1].payload is None:
            raise SpecError(f"{self.id} has no recorded answers of {suite!r}, {label!r}")
        names = ("problem_ids", "strata", "correct", "confidence")
        payload = found[-1].payload
        known = {name: payload[name] for name in names if payload.get(name) is not None}
        return pd.DataFrame(known).astype({"confidence": float} if "confidence" in known else {})

    def rollouts(self, *steps: int) -> "pd.DataFrame":
        """One row per trained turn: problem, raw rewards, advantage, length, the text's beginning.

        Raw rewards are `rewards/NAME`, values of the whole row `scores/NAME`; NaN where absent.
        Without steps, all that are stored.
        """
        with open_registry(self.registry) as registry:
            wanted = select_rollout_steps(registry, registry.run(self.id), steps)
            index = {step: registry.results.rollout_index(self.id, step) for step in wanted}
        return _build_frame(
            {"step": step, **_spread_fields(asdict(row), "rewards", "scores")}
            for step, rows in index.items()
            for row in rows
        )

    def trajectories(self, *steps: int) -> "pd.DataFrame":
        """One row per token of the trained rows: text, author, mask, rewards, advantage, weight.

        Without steps, those of the newest that is stored.
        """
        with open_registry(self.registry) as registry:
            run = registry.run(self.id)
            wanted = select_rollout_steps(registry, run, steps)
            bodies = {
                step: registry.results.rollout_body(run.id, step)
                for step in (wanted if steps else wanted[-1:])
            }
            return _build_token_frame(
                ({"step": step}, row)
                for step, body in bodies.items()
                for row in load_step_accounts(run, body).rows
            )


@dataclass(frozen=True, slots=True)
class Pictures:
    """Files of pictures, each as PNG and SVG, that a notebook shows."""

    files: tuple[Path, ...]

    def _repr_html_(self) -> str:
        return "".join(
            f'<img alt="{escape(file.stem)}" src="data:image/svg+xml;base64,'
            f'{b64encode(file.read_bytes()).decode()}"/>'
            for file in self.files
            if file.suffix == ".svg"
        )


@contextmanager
def _open_bar() -> Iterator[Callable[[Progress], None]]:
    """Shows the progress of a run in a notebook; elsewhere nothing."""
    if "ipykernel" not in sys.modules:
        yield lambda progress: None
        return
    from IPython.display import HTML, display

    shown = display(HTML(""), display_id=True)

    def show(progress: Progress) -> None:
        stage, note = escape(progress.stage), escape(progress.note or progress.doing)
        bar = f'<progress value="{progress.done}" max="{progress.total}"></progress>'
        text = f"{stage} {progress.done}/{progress.total} <code>{note}</code>"
        shown.update(HTML(f"{bar} {text}"))

    yield show


def _build_resumed_spec(run: RunRecord, overrides: tuple[str, ...]) -> ExperimentSpec:
    """The run's experiment with the overrides; SpecError if they make it another experiment."""
    read, plugins = check_file(locate_run_folder(run).resolved_spec, overrides)
    if not is_spec_of_run(read.spec, run):
        raise SpecError(
            f"{run.id} would be another experiment: only `runner` and `tracking` can change; "
            f"for the rest: rlx submit SPEC --from-checkpoint {run.id}@latest"
        )
    run_preflight_checks(read, plugins)
    return read.spec


def open_run(name: str = "latest", *, registry: str | None = None) -> Run:
    """Opens a recorded run.

    Args:
        name: its id, its number, or `latest`.
        registry: URL of the registry; None takes that of the command line: `RLX_REGISTRY`, or the
            one in `RLX_HOME`.
    """
    if not isinstance(name, str):
        raise SpecError(f"a run is named by text, such as 'latest', not by a {type(name).__name__}")
    url = get_registry_url(registry)
    with open_registry(url) as opened:
        return Run(opened.run(name).id, url)


def list_runs(
    *, name: str | None = None, group: str | None = None, registry: str | None = None
) -> list[Run]:
    """Lists runs, newest first: those of the experiment `name`, and of the group."""
    url = get_registry_url(registry)
    with open_registry(url) as opened:
        return [Run(run.id, url) for run in opened.runs(name=name, group=group)]


def check_submission(
    experiments: Sequence[tuple[LoadedSpec, ExperimentPlugins]], *, elsewhere: bool, rehearse: bool
) -> tuple[list[tuple[LoadedSpec, ExperimentPlugins]], tuple[Diagnostic, ...]]:
    """Checks what experiments need of this machine, and sends synthetic rollouts through them.

    Args:
        elsewhere: another machine may run them, so what this one lacks is only a warning.

    Returns:
        The experiments, with the warnings of their rehearsals; and every warning once.

    Raises:
        EnvironmentFault: this machine lacks what an experiment needs.
        InvalidSpec: a rehearsal finds an error.
    """
    lacks = [w for each in experiments for w in run_preflight_checks(*each, elsewhere=elsewhere)]
    found: Sequence[tuple[Diagnostic, ...]] = [()] * len(experiments)
    if rehearse:
        with speed_up_imports():
            from rlx.plan import run_rehearsal_checks  # imports torch

        found = run_rehearsal_checks(experiments, elsewhere=elsewhere)
    checked = [
        (read, replace(plugins, warnings=plugins.warnings + more))
        for (read, plugins), more in zip(experiments, found, strict=True)
    ]
    own = (warning for _, plugins in checked for warning in plugins.warnings)
    return checked, tuple(dict.fromkeys((*own, *lacks)))


@dataclass(frozen=True, slots=True)
class Experiment:
    """A valid experiment.

    Attributes:
        path: its file; `<python>` for one that was given as a mapping.
        loaded: its spec, with the place of every value.
    """

    path: Path
    loaded: LoadedSpec
    plugins: ExperimentPlugins

    @property
    def spec(self) -> ExperimentSpec:
        """Every value, with defaults filled in."""
        return self.loaded.spec


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """What an experiment does to every token of synthetic rollouts."""

    report: "PlanReport"

    @property
    def findings(self) -> tuple[Diagnostic, ...]:
        """Errors and warnings."""
        return self.report.findings

    def __str__(self) -> str:
        """The verdict and what was found, as `rlx plan` prints them."""
        from rich.console import Console

        from rlx.plan import show_plan

        out = StringIO()
        plain = Console(file=out, width=100, force_terminal=False, force_jupyter=False)
        show_plan(self.report, plain, full=False)
        verdict = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
        return "\n\n".join([verdict, *map(str, self.findings)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows it in a notebook."""
        printer.text(str(self))

    def tokens(self) -> "pd.DataFrame":
        """One row per token: its author, rewards, advantage and weight in the loss.

        The columns are those of `Run.trajectories`, with `phase` in place of `step`.
        """
        return _build_token_frame(
            ({"phase": ", ".join(phase.names)}, row)
            for phase in self.report.phases
            for row in phase.rows
        )


Source = Path | str | Mapping[str, Any] | ExperimentSpec | Experiment
"""A YAML file, or what it would hold, where a plugin may be a function or a class; or as read."""


def read(source: Source, *overrides: str) -> Experiment:
    """Reads an experiment and checks it with its plugins.

    Args:
        source: a YAML file, or what it would hold; paths are then relative to the current folder.
            A function or class that stands for a plugin is kept by its source, with what it uses
            of its module.
        overrides: `path.to.key=value`.

    Raises:
        InvalidSpec: a `SpecError` that names every fault with its line.
        PluginError: a plugin is missing or broken.
        EnvironmentFault: this machine lacks files or packages that a plugin reads.
    """
    if isinstance(source, Experiment):
        if not overrides:
            return source
        source = source.spec
    if isinstance(source, ExperimentSpec):
        source = source.dump_resolved()
    if not isinstance(source, Mapping | Path | str):
        kind = type(source).__name__
        raise SpecError(f"an experiment is a file, a mapping or an ExperimentSpec, not a {kind}")
    if wrong := [one for one in overrides if not isinstance(one, str)]:
        raise SpecError(f"an override is text, path.to.key=value, not a {type(wrong[0]).__name__}")
    loaded, plugins = check_file(source if isinstance(source, Mapping) else Path(source), overrides)
    return Experiment(Path(loaded.document.file), loaded, plugins)


def validate(source: Source, *overrides: str) -> tuple[Diagnostic, ...]:
    """Returns every error and warning of an experiment, for which `read` raises InvalidSpec."""
    try:
        return read(source, *overrides).plugins.warnings
    except InvalidSpec as error:
        return error.diagnostics


def plan_experiment(source: Source, *overrides: str) -> ExperimentPlan:
    """Sends synthetic rollouts through an experiment's rewards, mask and estimator; see `read`.

    Loads no model, and downloads nothing if `HF_HUB_OFFLINE=1` is set.
    """
    from rlx.plan import build_plan

    experiment = read(source, *overrides)
    return ExperimentPlan(build_plan(experiment.path, experiment.loaded, experiment.plugins))


@label_refusal("submitted")
def submit(
    source: Source,
    *overrides: str,
    again: bool = False,
    queue: bool = False,
    rehearse: bool = True,
    anyway: bool = False,
) -> Run:
    """Reads an experiment, records a run and starts it in the background, where it outlives this
    process; logs warnings.

    Args:
        source: as of `read`.
        overrides: as of `read`.
        again: run even if the same spec and seed have finished or are active; otherwise that run is
            returned.
        queue: only record the run; `Run.resume` starts it.
        rehearse: first send synthetic rollouts through the experiment.
        anyway: train even where the first answers of a pretrained model carry no signal.

    Raises:
        EnvironmentFault: this machine lacks what the experiment needs.
        InvalidSpec: the rehearsal finds an error, or the checkpoint to start from is missing or of
            another model.
    """
    given = read(source, *overrides)
    url, experiment = registry_url(given.loaded), (given.loaded, given.plugins)
    (finished,) = [None] if again else find_finished_runs(url, [experiment])
    if finished is not None:
        return Run(finished.id, url)
    elsewhere = queue or given.spec.runner.launcher.submits_jobs
    (checked,), warnings = check_submission([experiment], elsewhere=elsewhere, rehearse=rehearse)
    for warning in warnings:
        log_report(str(warning), err=True)
    with open_registry(url, read_only=False) as registry:
        run, _ = start_experiment(registry, *checked, again=again, queue=queue, anyway=anyway)
    return Run(run.id, url)


def compare(*names: str, registry: str | None = None) -> Comparison:
    """Compares recipes over their seeds: what they differ in, and their metrics.

    Args:
        names: runs, groups, or names of experiments; runs that differ in their seed alone form one
            recipe.
    """
    with open_registry(get_registry_url(registry)) as opened:
        return compare_recipes(opened, names)


def score(
    responses: Path | str | Iterable[Mapping[str, Any]],
    reward: str | Callable[..., Any],
    *overrides: str,
    workers: int = 1,
    deadline: float = 5.0,
) -> "pd.DataFrame":
    """Scores responses with a reward plugin, in worker processes.

    Args:
        responses: a file of JSON Lines, or one mapping per response: `response`, and the fields of
            its task.
        reward: name of the plugin; or a function or class, as in `read`.
        overrides: `option=value` of the plugin.
        workers: number of worker processes.
        deadline: time limit of one call, in seconds.

    Returns:
        One row per response: `line`, `id`, `status` (`scored` or `absent`), `score`, `reason`, and
        the parts of the score as `parts/NAME`.
    """
    name = reward if isinstance(reward, str) else keep_plugin_source(reward)
    plugin = build_reward(name, overrides)
    if isinstance(responses, Path | str):
        with open_response_lines(str(responses)) as lines:
            scored = [*score_lines(plugin, lines, workers=workers, deadline=deadline)]
    else:
        given = [] if isinstance(responses, Mapping) else list(responses)
        if isinstance(responses, Mapping) or not all(isinstance(one, Mapping) for one in given):
            raise SpecError("responses are a file, or a list with a mapping for each response")
        encoded = (json.dumps(dict(one)).encode() for one in given)
        scored = [*score_lines(plugin, encoded, workers=workers, deadline=deadline)]
    return _build_frame(
        _spread_fields(line.to_plain_dict(), "parts") for batch in scored for line in batch
    )
