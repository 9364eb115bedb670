"""A run's folder on two machines, with its copy in an S3 server."""

import os
import shutil
from pathlib import Path

import pytest
from s3 import BUCKET, s3_server

from rlx_registry import StoredFolder, StoreError, record_supervisor
from rlx_registry.home_urls import find_folder_url, locate_folder, locate_working_folder


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def machines(server, monkeypatch, tmp_path):
    """A run's folder on two machines, which have nothing but the store in common."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{tmp_path.name}/runs/r-0001"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "spec.json").write_text("{}")
    return [StoredFolder(tmp_path / name, url) for name in ("one", "other")]


def write(machine, name, text, at=None):
    path = machine._folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if at is not None:
        os.utime(path, ns=(at, at))


def read(machine):
    """What is in a folder, apart from what is hidden."""
    found = {}
    for path in sorted(machine._folder.rglob("*")):
        inside = path.relative_to(machine._folder).as_posix()
        if path.is_file() and not inside.startswith("."):
            found[inside] = path.read_text()
    found.pop("spec.json", None)  # there from the beginning
    return found


def test_what_is_sent_is_fetched(machines):
    one, other = machines
    write(one, "rollouts/step_1.parquet", "rows")
    one.send(own=True)
    other.fetch()
    assert read(other) == {}, "the top alone"
    assert (other._folder / "spec.json").exists()
    other.fetch("rollouts/step_1.parquet")
    assert read(other) == read(one)


@pytest.mark.parametrize("text", ["new", "as long"])
def test_what_changes_is_sent_again(machines, text):
    one, other = machines
    write(one, "run.log", "was one")
    one.send(own=True)
    other.fetch()
    write(one, "run.log", text)
    one.send(own=True)
    other.fetch()
    assert read(other) == {"run.log": text}


def test_nothing_is_sent_or_fetched_twice(machines, server):
    one, other = machines
    write(one, "model/config.json", "{}")
    one.send(own=True)
    other.fetch("")
    before = {key: server.client.head_object(Bucket=BUCKET, Key=key) for key in server.list()}
    times = (other._folder / "model/config.json").stat().st_mtime_ns
    one.send(own=True), other.send(own=True), other.fetch("")
    for key, head in before.items():
        assert server.client.head_object(Bucket=BUCKET, Key=key)["ETag"] == head["ETag"]
        own = server.client.head_object(Bucket=BUCKET, Key=key)["LastModified"]
        assert own == head["LastModified"]
    assert (other._folder / "model/config.json").stat().st_mtime_ns == times


def test_what_is_removed_here_is_removed_there(machines):
    one, other = machines
    for step in (1, 2):
        write(one, f"checkpoints/step_{step}/manifest.json", str(step))
    one.send(own=True)
    other.fetch("checkpoints")
    shutil.rmtree(one._folder / "checkpoints/step_1")
    one.send(own=True)
    other.fetch("checkpoints")
    assert read(other) == {"checkpoints/step_2/manifest.json": "2"}


def test_files_that_nobody_here_has_seen_stay(machines):
    """A machine removes what it has had, not what another has sent meanwhile."""
    one, other = machines
    write(one, "a", "a")
    one.send(own=True)
    other.fetch()
    write(other, "b", "b")
    other.send(own=True)
    one.send(own=True)
    third = StoredFolder(one._folder.parent / "third", one._url)
    third.fetch("")
    assert read(third) == {"a": "a", "b": "b"}


def test_the_store_wins_where_another_machine_has_sent(machines):
    """A machine that was lost with a run in its hands comes back: the run has gone on elsewhere."""
    one, other = machines
    write(one, "journal.jsonl", "1\n")
    one.send(own=True)
    write(one, "journal.jsonl", "1\n2 of one\n")  # not sent any more
    other.fetch("")
    write(other, "journal.jsonl", "1\n2 of the other\n3\n")
    other.send(own=True)
    one.fetch("")
    assert read(one) == {"journal.jsonl": "1\n2 of the other\n3\n"}


def test_what_has_not_been_sent_is_kept(machines):
    one, _ = machines
    write(one, "journal.jsonl", "1\n")
    one.send(own=True)
    write(one, "journal.jsonl", "1\n2\n")
    write(one, "notes", "own")
    one.fetch("")
    assert read(one) == {"journal.jsonl": "1\n2\n", "notes": "own"}


def test_a_living_supervisor_alone_changes_its_folder(machines):
    one, other = machines
    write(one, "a", "a")
    one.send(own=True)
    other._folder.mkdir()
    record_supervisor(other._folder, os.getpid())
    other.fetch("")
    assert "a" not in read(other)


def test_what_means_something_on_one_machine_alone_stays_there(machines, server):
    one, _ = machines
    own = (
        "supervisor.json",
        "progress.json",
        "reserve",
        ".hidden",
        "checkpoints/step_1.part-1/x",
    )
    for name in own:
        write(one, name, "own")
    (one._folder / "link").symlink_to("/etc/hostname")
    write(one, "spec.json", "{}")
    one.send(own=True)
    prefix = one._url.split("/", 3)[3]
    assert list(server.list(prefix)) == [f"{prefix}/spec.json"]


def test_a_manifest_is_sent_after_the_files_that_it_names(machines, monkeypatch):
    one, other = machines
    write(one, "checkpoints/step_1/manifest.json", "{}")
    write(one, "checkpoints/step_1/weights", "w" * 100)
    store, _ = one._open()
    put, sent = store.put, []

    def record(ours, theirs):
        sent.append([Path(path).name for path in ours])
        if len(sent) == 2:
            raise OSError("the network is gone")
        put(ours, theirs)

    monkeypatch.setattr(store, "put", record)
    with pytest.raises(StoreError, match="cannot be written: the network is gone"):
        one.send(own=True)
    assert sent == [["spec.json", "weights"], ["manifest.json"]] or sent == [
        ["weights", "spec.json"],
        ["manifest.json"],
    ]
    other.fetch("")
    assert read(other) == {"checkpoints/step_1/weights": "w" * 100}
    monkeypatch.undo()


def test_an_unreadable_record_of_transfers_is_named(machines):
    one, _ = machines
    one.send(own=True)
    write(one, ".stored.json", "[1")
    with pytest.raises(StoreError, match=r"\.stored\.json cannot be read"):
        one.send(own=True)


def test_a_part_is_removed_or_all(machines, server):
    one, _ = machines
    for name in ("rollouts/a", "checkpoints/b", "spec.json"):
        write(one, name, "x")
    one.send(own=True)
    one.remove("rollouts", "nowhere")
    prefix = one._url.split("/", 3)[3]
    assert sorted(server.list(prefix)) == [f"{prefix}/checkpoints/b", f"{prefix}/spec.json"]
    assert one.exists
    one.remove()
    assert server.list(prefix) == {}
    one.remove()


def test_a_store_that_is_away_is_named(machines, server):
    one, _ = machines
    write(one, "a", "a")
    elsewhere = StoredFolder(one._folder, "s3://nowhere/runs/r-0001")
    with pytest.raises(StoreError, match="s3://nowhere/runs/r-0001 cannot be written: "):
        elsewhere.check()
    unknown = StoredFolder(one._folder, "ftpx://host/runs/r-0001")
    with pytest.raises(StoreError, match="ftpx"):
        unknown.send(own=True)
    one.check()
    assert not any(".trial" in key for key in server.list())


def test_a_folder_has_a_url_and_a_url_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RLX_HOME", "s3://bucket/team a/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    working = locate_working_folder("s3://bucket/team a")
    assert working.is_relative_to(tmp_path)
    assert find_folder_url(working / "runs" / "r-0001.2") == "s3://bucket/team a/runs/r-0001.2"
    assert locate_folder("s3://bucket/team a/runs/r-0001.2") == str(working / "runs" / "r-0001.2")
    assert locate_folder("s3://bucket/team b/runs/r-0001") != str(working / "runs" / "r-0001")
    for hostile in ("s3://bucket/runs/..", "s3://bucket/runs/a/b", "s3://bucket/x", "s3://runs/"):
        with pytest.raises(StoreError, match="is not the URL of a run's folder"):
            locate_folder(hostile)
    assert find_folder_url(tmp_path / "elsewhere") is None
    monkeypatch.setenv("RLX_HOME", str(tmp_path))
    assert find_folder_url(tmp_path / "runs") is None


def test_a_machine_that_was_overtaken_sends_nothing_over_what_is_there(machines):
    one, other = machines
    write(one, "run.log", "1\n")
    one.send(own=True)
    other.fetch("")
    write(other, "run.log", "1\n2\n")
    other.send(own=True)
    write(one, "run.log", "1\nstale\n")
    write(one, "pictures/curve.png", "new")
    one.send(own=True)
    third = StoredFolder(one._folder.parent / "third", one._url)
    third.fetch("")
    assert read(third) == {"run.log": "1\n2\n", "pictures/curve.png": "new"}


def test_whoever_evaluates_a_run_leaves_its_log_and_its_checkpoints_alone(machines):
    one, other = machines
    for name in ("journal.jsonl", "checkpoints/step_1/manifest.json"):
        write(one, name, "own")
    one.send(own=True)
    other.fetch("")
    write(other, "journal.jsonl", "own, and an evaluation")
    write(other, "evaluations/a", "answers")
    shutil.rmtree(other._folder / "checkpoints")
    other.send()
    third = StoredFolder(one._folder.parent / "third", one._url)
    third.fetch("")
    assert read(third) == {
        "journal.jsonl": "own",
        "checkpoints/step_1/manifest.json": "own",
        "evaluations/a": "answers",
    }


def test_a_cache_that_was_emptied_takes_nothing_from_the_store(machines):
    one, _ = machines
    write(one, "rollouts/step_1.parquet", "rows")
    one.send(own=True)
    shutil.rmtree(one._folder / "rollouts")
    write(one, "notes", "new")
    one.send(own=True)
    one.fetch("rollouts")
    assert read(one) == {"rollouts/step_1.parquet": "rows", "notes": "new"}


def test_a_store_that_was_emptied_takes_nothing_from_here(machines):
    one, _ = machines
    write(one, "journal.jsonl", "1\n")
    one.send(own=True)
    one.remove()
    one.fetch("")
    assert read(one) == {"journal.jsonl": "1\n"}


@pytest.mark.parametrize("arrives", [False, True])
def test_a_machine_that_is_killed_while_it_sends_keeps_what_it_has(machines, monkeypatch, arrives):
    one, _ = machines
    write(one, "journal.jsonl", "1\n")
    one.send(own=True)
    write(one, "journal.jsonl", "1\n2\n")
    store, _ = one._open()
    put = store.put

    def end(ours, theirs):
        if arrives:
            put(ours, theirs)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "put", end)
    with pytest.raises(KeyboardInterrupt):
        one.send(own=True)
    monkeypatch.undo()
    write(one, "journal.jsonl", "1\n2\n3\n")
    again = StoredFolder(one._folder, one._url)
    again.fetch("")
    assert read(again) == {"journal.jsonl": "1\n2\n3\n"}
    again.send(own=True)
    third = StoredFolder(one._folder.parent / "third", one._url)
    third.fetch("")
    assert read(third) == read(again)


def test_names_from_the_store_stay_in_the_folder(machines, server, tmp_path):
    one, other = machines
    write(one, "a", "a")
    one.send(own=True)
    prefix = one._url.split("/", 3)[3]
    for name in (f"/{tmp_path}/absolute", "../outside", ".stored.json", "supervisor.json", "b//c"):
        server.client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=b"hostile")
    other.fetch("")
    assert read(other) == {"a": "a"}
    assert not (tmp_path / "outside").exists() and not (tmp_path / "absolute").exists()
    assert "hostile" not in (other._folder / ".stored.json").read_text()
