"""Bodies: written whole, read back only when they are what was recorded."""

import hashlib
import os

import pyarrow
import pytest
from pyarrow import parquet

from rlx_registry import BodyError, read_body, read_trees, search_body_trees, write_body
from rlx_registry.rollout_files import ROW_GROUP_BYTES

TABLE = pyarrow.table({"row": [0, 1], "advantage": pyarrow.array([0.1, -0.1], pyarrow.float32())})


def test_a_body_comes_back_equal_and_is_known_by_its_digest(tmp_path):
    path = tmp_path / "rollouts" / "step_000001.parquet"
    digest, size = write_body(path, TABLE)
    content = path.read_bytes()
    assert (digest, size) == (hashlib.sha256(content).hexdigest(), len(content))
    assert read_body(path, digest).equals(TABLE)
    assert read_body(path).equals(TABLE)
    assert parquet.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_body_is_whole_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, synced, fsync = tmp_path / "b.parquet", [], os.fsync

    def sync(file):
        synced.append((os.fstat(file).st_size, path.exists()))
        fsync(file)

    monkeypatch.setattr(os, "fsync", sync)
    _, size = write_body(path, TABLE)
    assert synced[0] == (size, False)


def test_few_trees_of_a_large_body_are_read_without_the_others(tmp_path):
    count, each = 40, 30_000
    numbers = pyarrow.array([[t + i / each for i in range(each)] for t in range(count)])
    none = pyarrow.array([[]] * count, pyarrow.list_(pyarrow.string()))
    table = pyarrow.table({"tree": range(count), "values": numbers, "segments": none, "rows": none})
    digest, _ = write_body(tmp_path / "b.parquet", table)
    assert read_body(tmp_path / "b.parquet", digest).equals(table)
    found = read_trees(tmp_path / "b.parquet", digest, [31, 4])
    assert [record["tree"] for record in found] == [4, 31]
    assert found[1]["values"] == numbers[31].as_py()
    groups = parquet.ParquetFile(tmp_path / "b.parquet").metadata
    assert max(groups.row_group(i).num_rows for i in range(groups.num_row_groups)) * each * 8 <= (
        ROW_GROUP_BYTES + each * 8
    )


def test_trees_are_found_by_what_is_said_in_them(tmp_path):
    said = [["What is 2 + 2?", "ÄHM four, what?"], ["?", "What five"], ["What"]]
    segments = [[{"author": "policy", "text": text} for text in texts] for texts in said]
    table = pyarrow.table({"tree": [7, 3, 5], "segments": segments})
    digest, _ = write_body(tmp_path / "b.parquet", table)
    found = {
        w: search_body_trees(tmp_path / "b.parquet", digest, w) for w in ("what", "ähm", "six")
    }
    assert found == {"what": {7, 3}, "ähm": {7}, "six": set()}
    with pytest.raises(BodyError, match="recorded as 000000000000"):
        search_body_trees(tmp_path / "b.parquet", "0" * 64, "what")


def test_a_write_that_fails_leaves_the_old_body_and_nothing_else(tmp_path, monkeypatch):
    digest, _ = write_body(tmp_path / "b.parquet", TABLE)

    def broken(table, file, **options):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(parquet, "write_table", broken)
    with pytest.raises(OSError, match="disk full"):
        write_body(tmp_path / "b.parquet", TABLE)
    monkeypatch.undo()
    assert read_body(tmp_path / "b.parquet", digest).equals(TABLE)
    assert [p.name for p in tmp_path.iterdir()] == ["b.parquet"]


def test_a_changed_missing_or_damaged_body_is_refused_by_name(tmp_path):
    path = tmp_path / "b.parquet"
    digest, _ = write_body(path, TABLE)
    with pytest.raises(BodyError, match=r"body b.parquet was recorded as 000000000000…"):
        read_body(path, "0" * 64)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(BodyError, match=f"recorded as {digest[:12]}"):
        read_body(path, digest)
    with pytest.raises(BodyError, match=r"b\.parquet is damaged"):
        read_body(path)
    path.unlink()
    with pytest.raises(BodyError, match=r"cannot read body b\.parquet: No such file"):
        read_body(path, digest)
