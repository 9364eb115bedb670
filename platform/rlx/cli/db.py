"""`rlx db`: care for the registry's database."""

import click

import rlx_registry
from rlx.cli.registry import registry_option
from rlx.run.paths import tracking_url
from rlx.run.trouble import as_fault

__all__ = ["db"]


@click.group()
def db() -> None:
    """Care for the registry of runs."""


@db.command()
@registry_option
def upgrade(url: str) -> None:
    """Bring the registry to the newest schema.

    An SQLite file is copied beside itself first. Back up a PostgreSQL database yourself, and let no
    run write to it meanwhile.

    Exit codes: 0 done, or nothing to do; 5 the database cannot be upgraded.
    """
    try:
        before, after = rlx_registry.Registry.upgrade(tracking_url(url))
    except rlx_registry.RegistryError as error:
        raise as_fault(error) or error from error
    if before == after:
        click.echo(f"nothing to do: the registry is at revision {after}")
    elif before is None:
        click.echo(f"made a registry at revision {after}")
    else:
        click.echo(f"upgraded the registry from revision {before} to {after}")
