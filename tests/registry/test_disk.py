"""Network disks, as far as a machine without one can show."""

from pathlib import Path

import pytest
from submissions import submit

from rlx_registry import Registry, sqlite

MOUNT = "36 35 {device} / /mnt rw,noatime master:1 - {kind} server:/export rw"


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens one registry on a file system of a kind; returns its journal's mode and safety."""

    def open_on(kind):
        number = tmp_path.stat().st_dev
        device = f"{sqlite.os.major(number)}:{sqlite.os.minor(number)}"
        table = MOUNT.format(device=device, kind=kind)
        with monkeypatch.context() as patched:
            patched.setattr(
                Path, "read_text", lambda _: f"22 1 0:21 / /proc rw - proc proc rw\n{table}"
            )
            with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
                submit(registry)
                with registry.open_writer() as connection:
                    pragmas = ("journal_mode", "synchronous")
                    return tuple(
                        connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas
                    )

    return open_on


@pytest.mark.sqlite
def test_a_network_disk_has_no_shared_log_also_where_the_registry_moves(opened, tmp_path):
    assert [opened(kind) for kind in ("ext4", "nfs4", "xfs")] == [
        ("wal", 1),
        ("delete", 2),
        ("wal", 1),
    ]
    assert opened("cifs")[0] == "delete" and not list(tmp_path.glob("*-wal"))
