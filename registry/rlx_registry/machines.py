"""Leases of a machine's devices.

A run holds a device exactly as long as it is running, not lost, and at the attempt that took the
device. Devices are therefore never released explicitly: rows of ended runs stay and are ignored.
"""

import time

from sqlalchemy import Connection, and_, delete, insert, select

from rlx_registry import models
from rlx_registry.database import acquire_named_lock, format_run_id
from rlx_registry.errors import DevicesBusyError
from rlx_registry.records import DeviceRecord, DeviceRequest
from rlx_registry.states import change_run_status, find_lost_runs

HOLDER = and_(
    models.run.c.id == models.device.c.run_id,
    models.run.c.attempt == models.device.c.attempt,
    models.run.c.status == "running",
)


def claim_devices(
    connection: Connection, key: int, attempt: int, request: DeviceRequest
) -> tuple[str, ...]:
    """Takes devices for a locked run that has just begun this attempt.

    A lost run that holds one of the devices is marked so. If it wakes up, its next heartbeat
    returns False before it uses a device that now belongs to another run.

    Raises:
        DevicesBusyError: too few devices are free; the message names the runs that hold the others.
    """
    if request.count == 0:
        return ()
    acquire_named_lock(connection, f"rlx devices {request.host}")
    c = models.device.c
    held = select(c.name, c.run_id).join(models.run, HOLDER)
    held = held.where(c.host == request.host, c.name.in_(request.names))
    claims = {row.name: row.run_id for row in connection.execute(held)}
    gone = find_lost_runs(connection, set(claims.values()))
    holders = {name: other for name, other in claims.items() if other not in gone}
    taken = tuple(name for name in request.names if name not in holders)[: request.count]
    if len(taken) < request.count:
        named = ", ".join(
            f"{format_run_id(holders[name])} holds {name}"
            for name in request.names
            if name in holders
        )
        free = len(request.names) - len(holders)
        raise DevicesBusyError(
            f"{request.host} has {free} of {request.count} devices free: {named}"
        )
    for other in sorted({claims[name] for name in taken if name in claims}):
        change_run_status(
            connection,
            other,
            ["running"],
            "lost",
            f"no heartbeat; its devices were given to {format_run_id(key)}",
        )
    connection.execute(delete(models.device).where(c.host == request.host, c.name.in_(taken)))
    row = {"host": request.host, "run_id": key, "attempt": attempt, "at": time.time()}
    connection.execute(insert(models.device), [row | {"name": name} for name in taken])
    return taken


def list_held_devices(connection: Connection, host: str | None) -> list[DeviceRecord]:
    """Returns the devices currently held, of one machine or of all."""
    c = models.device.c
    query = select(models.device).join(models.run, HOLDER).order_by(c.host, c.name)
    query = query.where(c.run_id.not_in(list(find_lost_runs(connection))))
    if host is not None:
        query = query.where(c.host == host)
    return [
        DeviceRecord(row.host, row.name, format_run_id(row.run_id), row.attempt, row.at)
        for row in connection.execute(query)
    ]
