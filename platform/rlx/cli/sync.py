"""`rlx sync`: sends MLflow what it missed."""

from collections.abc import Mapping

import click

from rlx.cli.completion import complete_run
from rlx.cli.options import registry_option
from rlx.cli.output import print_text
from rlx.cli.progress import open_progress
from rlx.errors import SpecError
from rlx.home import get_rlx_home, tracking_url
from rlx.launch import get_mlflow_uri, open_registry
from rlx_registry import ENDED, Registry, RunRecord

__all__ = ["sync"]


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_run)
@registry_option
def sync(runs: tuple[str, ...], url: str) -> None:
    """Send MLflow the records that it missed of each RUN, or of every run that has ended.

    A missing or incomplete store is created first. The exit code is 4 if MLflow cannot be
    reached; the registry keeps all records until then.
    """
    with open_registry(url) as reading:  # read-only: creates no registry
        named = list({run.id: run for run in map(reading.run, runs)}.values())
    for run in named:
        if get_mlflow_uri(run) is None:
            raise SpecError(f"{run.id} has no mirror: its spec says `tracking.mlflow: null`")
    with open_registry(url, read_only=False) as registry:
        candidates = named or [r for r in reversed(registry.runs()) if r.effective_status in ENDED]
        stores: dict[str, list[RunRecord]] = {}
        for run in candidates:
            if get_mlflow_uri(run) is None:
                continue
            stores.setdefault(tracking_url(get_mlflow_uri(run) or ""), []).append(run)
        _send_to_every_mlflow(registry, stores, every_run=bool(named))


def _send_to_every_mlflow(
    registry: Registry, stores: Mapping[str, list[RunRecord]], *, every_run: bool
) -> None:
    """Sends runs to their MLflow; if one MLflow is unreachable, the others are still sent theirs.

    Args:
        registry: open for writing.
        stores: runs by tracking URI.
        every_run: send every run; otherwise only those that MLflow lacks in part or at all.

    Raises:
        MirrorUnavailableError: the first failure, after all other MLflows were sent their runs.
    """
    from rlx.record import MirrorUnavailableError

    failures: list[MirrorUnavailableError] = []
    sent = total = 0
    with open_progress("sending to MLflow", "runs") as show:
        for uri, runs in stores.items():
            try:
                behind = _prepare_runs(registry, uri, runs, every_run)
                total += len(behind)
                for run in behind:
                    show(sent, total)
                    _send_run(registry, uri, run)
                    sent += 1
            except MirrorUnavailableError as error:
                failures.append(error)
    if failures:
        raise failures[0]
    if not sent:
        print_text("MLflow is up to date")


def _prepare_runs(
    registry: Registry, uri: str, runs: list[RunRecord], every_run: bool
) -> list[RunRecord]:
    """Creates MLflow's store if need be; returns the runs that MLflow must be sent."""
    from rlx.record import MirrorClient, ensure_store, is_mirror_behind

    if remade := ensure_store(uri):
        print_text(f"warning: {remade}", err=True)
    if every_run:
        return runs
    known = MirrorClient(uri).list_run_ids()  # it may have lost its store
    return [r for r in runs if r.mlflow_run_id not in known or is_mirror_behind(registry, r)]


def _send_run(registry: Registry, uri: str, run: RunRecord) -> None:
    from rlx.record import MlflowMirror

    sent = MlflowMirror(registry, run.id, uri, get_rlx_home() / "mlartifacts").catch_up()
    print_text(f"{run.id}: {sent} point{'' if sent == 1 else 's'} sent to MLflow")
