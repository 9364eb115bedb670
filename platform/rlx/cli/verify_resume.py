"""`rlx verify-resume`: kills runs and compares their records with an uninterrupted run."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from rlx.cli.console import build_table, open_console
from rlx.cli.options import overrides_option
from rlx.cli.output import print_text
from rlx.cli.progress import open_progress
from rlx.errors import SpecError
from rlx.launch import VICTIMS, KillResult, run_resume_trial
from rlx.plan import read_spec

__all__ = ["verify_resume"]


@click.command(name="verify-resume")
@click.argument("spec", type=click.Path(path_type=Path, exists=True))
@overrides_option()
@click.option(
    "--kills", default=4, type=click.IntRange(1), help="Number of runs, each killed once."
)
@click.option("--at-once", default=1, type=click.IntRange(1), help="Runs at a time.")
@click.option("--seed", default=0, type=int, help="Seed of the times of the kills.")
@click.option(
    "--registry", "url", metavar="URL", help="Registry to use instead of a new SQLite file."
)
@click.option("--keep", is_flag=True, help="Keep the folder with the runs.")
def verify_resume(
    spec: Path,
    overrides: tuple[str, ...],
    kills: int,
    at_once: int,
    seed: int,
    url: str | None,
    keep: bool,
) -> int:
    """Run SPEC uninterrupted, then with kills, and compare every number except times.

    Runs are queued for an `rlx worker`. Each is killed once, at a time drawn uniformly over the
    duration of an uninterrupted run; the victims take turns: a rank, the supervisor, a scorer, the
    worker, and with --set runner.launcher=ray an actor, a raylet and the driver. Runs recover
    without `rlx resume`. They are mirrored to MLflow, which must have every
    point of the registry after a last `rlx sync`. The exit code is 1 if a number or a point differs
    or a run does not finish.
    """
    _require_repeatable(spec, overrides)
    home = Path(tempfile.mkdtemp(prefix="rlx-verify-"))
    with open_progress("uninterrupted run", "runs") as show:
        found = run_resume_trial(
            spec,
            home,
            overrides=overrides,
            kills=kills,
            at_once=at_once,
            seed=seed,
            registry=url,
            report=print_text,
            show=show,
        )
    _show_kill_table(found.kills)
    print_text(
        f"{len(found.kills) - len(found.differing)} of {len(found.kills)} killed runs have the "
        "same numbers as the uninterrupted run"
    )
    wrong = bool(found.differing or found.unequal)
    if wrong or keep:
        print_text(f"the runs are in {home}")
    else:
        shutil.rmtree(home, ignore_errors=True)
    return int(wrong)


def _require_repeatable(file: Path, overrides: Sequence[str]) -> None:
    """Refuses an experiment whose numbers depend on time."""
    spec = read_spec(file, overrides).spec
    phases = [spec.resolve_phase_spec(phase) for phase in spec.phases]
    if any(phase.rollout.off_policy_steps > 1 for phase in phases):
        raise SpecError(
            "rollout.off_policy_steps is above 1: which weights sample a token depends on time, so "
            "no two runs have the same numbers; set it to 1 or 0 to compare runs"
        )


def _show_kill_table(done: Sequence[KillResult]) -> None:
    """Prints how often each victim was killed during which work."""
    counts = Counter((kill.work, kill.victim) for kill in done)
    victims = dict.fromkeys([*VICTIMS, *(kill.victim for kill in done)])
    rows = [
        (work, *(str(counts[work, victim] or "") for victim in victims))
        for work in sorted({kill.work for kill in done})
    ]
    open_console().print(build_table("killed during", *victims, rows=rows))
