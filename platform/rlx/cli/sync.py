"""`rlx sync`: sends MLflow the records that it missed."""

import click

from rlx.cli.registry import open_registry, registry_option
from rlx.errors import SpecError
from rlx_registry import Registry, RunRecord

__all__ = ["sync"]


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@registry_option
def sync(runs: tuple[str, ...], url: str) -> None:
    """Send MLflow the records that it missed of each RUN, or of every run that has ended.

    The exit code is 4 if MLflow cannot be reached; the registry keeps all records until then.
    """
    with open_registry(url) as reading:  # read-only: creates no registry
        named = list({run.id: run for run in map(reading.run, runs)}.values())
    for run in named:
        if _get_mlflow_uri(run) is None:
            raise SpecError(f"{run.id} has no mirror: its spec says `tracking.mlflow: null`")
    with open_registry(url, read_only=False) as registry:
        outdated = named or [run for run in reversed(registry.runs()) if _is_behind(registry, run)]
        if not outdated:
            click.echo("MLflow has been told everything")
        _send_runs_to_mlflow(registry, outdated)


def _get_mlflow_uri(run: RunRecord) -> str | None:
    """Returns the URI of MLflow in the run's spec."""
    uri: str | None = run.spec.get("tracking", {}).get("mlflow")
    return uri


def _is_behind(registry: Registry, run: RunRecord) -> bool:
    from rlx.record import is_mirror_behind

    return _get_mlflow_uri(run) is not None and is_mirror_behind(registry, run)


def _send_runs_to_mlflow(registry: Registry, runs: list[RunRecord]) -> None:
    """Sends each run to its MLflow; if one MLflow is unreachable, runs of others are still sent.

    Raises:
        MirrorUnavailableError: the first failure, after all other runs were sent.
    """
    from rlx.home import get_rlx_home, tracking_url
    from rlx.record import MirrorUnavailableError, MlflowMirror

    away: dict[str, MirrorUnavailableError] = {}
    for run in runs:
        uri = tracking_url(_get_mlflow_uri(run) or "")
        if uri in away:
            continue
        try:
            sent = MlflowMirror(registry, run.id, uri, get_rlx_home() / "mlartifacts").catch_up()
        except MirrorUnavailableError as error:
            away[uri] = error
        else:
            click.echo(f"{run.id}: {sent} point{'' if sent == 1 else 's'} sent to MLflow")
    for first in away.values():
        raise first
