"""`rlx db`: upgrades and restores the registry's database."""

from collections.abc import Iterator
from pathlib import Path

import click

import rlx_registry
from rlx.cli.options import registry_option
from rlx.cli.output import print_text
from rlx.cli.verb_group import SuggestingGroup
from rlx.errors import RegistryError
from rlx.home import RunFolder, format_path, tracking_url
from rlx.launch import convert_to_rlx_error, open_registry
from rlx.text import escape_unprintable
from rlx_registry import ImportedRun, find_journal

__all__ = ["db"]


@click.group(cls=SuggestingGroup)
def db() -> None:
    """Upgrade or restore the registry of runs."""


@db.command()
@registry_option
def upgrade(url: str) -> None:
    """Upgrade the registry to the newest schema.

    An SQLite file is first copied next to itself. Back up a PostgreSQL database yourself, and make
    sure that no run writes to it during the upgrade.

    Exit codes: 0 upgraded, or nothing to do; 5 the database cannot be upgraded.
    """
    try:
        before, after = rlx_registry.Registry.upgrade(tracking_url(url))
    except rlx_registry.RegistryDatabaseError as error:
        raise convert_to_rlx_error(error) or error from error
    if before == after:
        print_text(f"nothing to do: the registry is at revision {after}")
    elif before is None:
        print_text(f"created a registry at revision {after}")
    else:
        print_text(f"upgraded the registry from revision {before} to {after}")


@db.command("import")
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    metavar="FOLDER...",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@registry_option
def import_(folders: tuple[Path, ...], url: str) -> None:
    """Restore lost runs from the journals in their folders.

    Each FOLDER is a run folder, or contains run folders, such as RLX_HOME. Runs that the registry
    already has are skipped, so the command can be repeated.

    Exit codes: 0 restored, or nothing to do; 5 a folder holds no run, or one that cannot be read.
    """
    found = list(dict.fromkeys(each for folder in folders for each in _run_folders(folder)))
    refused = []
    with open_registry(url, read_only=False) as registry:
        for folder in found:
            try:
                _print_import_result(registry.import_run(folder), folder)
            except rlx_registry.RegistryDatabaseError as error:
                if isinstance(error, rlx_registry.DatabaseUnavailableError):
                    raise
                refused.append(folder)
                print_text(escape_unprintable(str(error)), err=True)
    if refused:
        raise RegistryError(
            f"{len(refused)} of {len(found)} folders hold no run that can be restored"
        )


def _run_folders(folder: Path) -> Iterator[Path]:
    """Yields the run folders in `folder` or its `runs`; else `folder` itself."""
    for place in (folder, folder / "runs"):
        inner = sorted(place.iterdir()) if place.is_dir() and not _is_run(folder) else []
        if found := [each for each in inner if each.is_dir() and _is_run(each)]:
            yield from found
            return
    yield folder


def _is_run(folder: Path) -> bool:
    run = RunFolder(folder)
    return find_journal(folder) is not None or run.resolved_spec.exists() or run.yaml.exists()


def _print_import_result(found: ImportedRun, folder: Path) -> None:
    run = found.run
    if not found.created:
        print_text(f"{run.id}: already in the registry")
        return
    steps = f"step {run.step}" + ("" if run.steps_total is None else f" of {run.steps_total}")
    print_text(
        f"{run.id}: restored from {format_path(folder)}: {escape_unprintable(run.name)}, "
        f"{run.effective_status}, {steps}"
    )
    if found.formerly != run.id:
        print_text(f"  formerly {found.formerly}, which is another run here")
    if found.left_out and (journal := find_journal(folder)):
        print_text(f"  of {escape_unprintable(format_path(journal))}:", err=True)
    for left_out in found.left_out:
        print_text(f"  left out: {escape_unprintable(left_out)}", err=True)
