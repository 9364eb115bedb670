"""Network disks, as far as a machine without one can show."""

import subprocess
import sys

import pytest

from rlx_registry import Registry, file_systems, sqlite

SUBMISSION = {
    "name": "n", "spec": {}, "yaml": "", "plugins": [], "code": {}, "environment": {}
}  # fmt: skip
NFS = 0x6969

linux = pytest.mark.skipif(sys.platform != "linux", reason="statfs(2) as Linux has it")


@linux
@pytest.mark.parametrize("folder", ["/", "/proc", "/dev/shm"])
def test_the_magic_number_is_the_systems(folder):
    said = subprocess.run(["stat", "-f", "-c", "%t", folder], capture_output=True, text=True)
    assert file_systems.get_file_system_magic(folder) == int(said.stdout, 16)
    with pytest.raises(FileNotFoundError):
        file_systems.get_file_system_magic("/nowhere")


@pytest.fixture
def opened(tmp_path, monkeypatch, caplog):
    """Opens one registry, on a disk with that magic number; returns its journal's mode."""

    def open_on(magic):
        monkeypatch.setattr(file_systems, "get_file_system_magic", lambda _: magic)
        sqlite._warn_of_network_disk.cache_clear()
        caplog.clear()
        with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
            registry.submit(digest="d", seed=0, **SUBMISSION)
            with registry.database.open_writer() as connection:
                pragmas = ("journal_mode", "synchronous")
                return tuple(
                    connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas
                )

    return open_on


@linux
@pytest.mark.parametrize("magic", sorted(file_systems.NETWORKS))
def test_a_network_disk_has_no_shared_log_and_is_named_once(opened, magic, tmp_path, caplog):
    assert opened(magic) == ("delete", 2)
    (warning,) = caplog.messages
    assert f"registry.db is on a network disk ({file_systems.NETWORKS[magic]})" in warning
    assert "set RLX_HOME to a local disk, or use a PostgreSQL database" in warning
    assert "\n" not in warning
    assert not list(tmp_path.glob("*-wal"))


@linux
def test_a_registry_that_moves_changes_its_journal(opened, caplog):
    modes = [opened(magic)[0] for magic in (0xEF53, NFS, 0xEF53)]
    assert modes == ["wal", "delete", "wal"]
    assert caplog.messages == []


@linux
def test_a_reader_of_a_network_disk_sees_what_was_written(opened, tmp_path):
    opened(NFS)
    url = f"sqlite:///{tmp_path}/registry.db"
    with Registry.open(url, read_only=True) as reader, Registry.open(url) as writer:
        writer.results.add_metrics("1", 1, {"loss": 0.5})
        assert reader.results.metrics("1") == {"loss": [(1, 0.5)]}
