"""Journals in the folders of runs, and a registry made again from them."""

import json
import math
import os
import re
import shutil
from dataclasses import replace

import pyarrow
import pytest
from filled import fill
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from many import processes
from schemas import kind_of, rows
from sqlalchemy import update

from rlx.cli import main
from rlx_registry import (
    DeviceRequest,
    JournalError,
    Registry,
    RolloutIndex,
    add_index_column,
    delete_rollout_records,
    journal,
    models,
    write_body,
)
from rlx_registry.changes import KINDS

SUBMISSION = {
    "name": "n", "spec": {}, "yaml": "", "plugins": [], "code": {}, "environment": {}
}  # fmt: skip


@pytest.fixture
def home(tmp_path):
    """A home with the folders of the runs that `fill` makes."""
    for number in range(1, 6):
        (tmp_path / "home" / "runs" / f"r-{number:04d}").mkdir(parents=True)
    return tmp_path / "home"


@pytest.fixture
def empty(url, tmp_path, request):
    """The URL of an empty registry of the same kind."""
    if kind_of(url) == "sqlite":
        return f"sqlite:///{tmp_path}/new/registry.db"
    server = request.getfixturevalue("postgres")
    return server.url(server.create(request.getfixturevalue("template")))


def told(registry, run_id):
    """Every public read of a run, but for its last sign of life."""
    steps = registry.results.rollout_steps(run_id)
    return {
        "run": replace(registry.run(run_id), heartbeat=None),
        "history": registry.history(run_id),
        "metrics": registry.results.metrics(run_id),
        "rows": registry.results.metric_rows_after(run_id, 0, 10**6),
        "events": registry.results.events(run_id),
        "evaluations": registry.results.evaluations(run_id),
        "checkpoints": registry.results.checkpoints(run_id),
        "artifacts": registry.results.artifacts(run_id),
        "index": {step: registry.results.rollout_index(run_id, step) for step in steps},
        "bodies": {step: registry.results.rollout_body(run_id, step) for step in steps},
        "groups": registry.list_run_groups(run_id),
        "note": registry.notes.read(run_id),
        "cursors": [
            registry.results.mirror_cursor(run_id, target)
            for target in ("mlflow", "mlflow-files", "mlflow-end")
        ],
    }


def everything(url):
    with Registry.open(url, read_only=True) as registry:
        return {run.id: told(registry, run.id) for run in registry.runs()}


@pytest.fixture
def imported(capsys):
    """Says `rlx db import`; returns its exit code and all that it printed."""

    def run(url, *folders):
        code = main(["db", "import", *map(str, folders), "--registry", url])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def lines(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_a_lost_registry_is_made_again_from_the_folders(url, empty, home, imported):
    with Registry.open(url) as registry:
        fill(registry, home)
    before = everything(url)
    assert len(before) == 5
    code, said = imported(empty, home)
    assert code == 0, said
    assert "r-0001: restored from" in said
    assert "rlcr, finished, step 2 of 2" in said
    assert everything(empty) == before
    kept = rows(empty)
    code, said = imported(empty, home / "runs", home / "runs" / "r-0001")
    assert (code, said) == (
        0,
        "".join(f"r-{n:04d}: already in the registry\n" for n in range(1, 6)),
    )
    assert rows(empty) == kept
    with Registry.open(empty) as registry:  # and it goes on
        again = {"digest": "new", "seed": 0, **SUBMISSION}
        assert registry.submit(**again)[0].id == "r-0006"
        registry.results.add_event("1", "note", "later")
        registry.results.add_artifact("1", "later", "file")
        assert registry.transition("1", ["finished"], "failed")
        last = registry.results.events("1")[-1]
        assert last.message == "later"
        assert last.id > max(event["id"] for event in kept["rlx_event"])


def test_what_follows_an_import_is_in_the_journal_too(url, empty, home, imported):
    with Registry.open(url) as registry:
        fill(registry, home)
    imported(empty, home / "runs")
    with Registry.open(empty) as registry:
        registry.start("2", ["stopped"], "resumed")
        registry.results.add_event("2", "note", "once more")
        registry.results.add_metrics("2", 1, {"train/loss": 4.0})
        registry.transition("2", ["running"], "finished")
        before = told(registry, "2")
    with Registry.open(f"sqlite:///{home}/third.db") as registry:
        registry.import_run(home / "runs" / "r-0002")
        assert told(registry, "2") == before


def test_a_number_that_is_taken_is_changed_and_said(url, empty, home, imported):
    with Registry.open(url) as registry:
        fill(registry, home)
        before = told(registry, "1")
    with Registry.open(empty) as registry:
        registry.submit(digest="other", seed=0, **SUBMISSION)
        for write in (registry.results.add_event, registry.results.add_artifact):
            write("1", "a", "b")
    code, said = imported(empty, home / "runs" / "r-0001")
    assert code == 0
    assert "r-0002: restored from" in said
    assert "formerly r-0001, which is another run here" in said
    with Registry.open(empty) as registry:
        after = told(registry, "2")
    numbers = [[event.id for event in each["events"]] for each in (before, after)]
    assert numbers[1] == [number + numbers[1][0] - numbers[0][0] for number in numbers[0]]
    for name in ("history", "metrics", "rows", "evaluations", "checkpoints", "index", "cursors"):
        assert after[name] == before[name], name
    assert after["run"] == replace(before["run"], id="r-0002")
    assert [a.path for a in after["artifacts"]] == [a.path for a in before["artifacts"]]
    # A file that MLflow has not been told of is above the cursor still.
    assert after["artifacts"][-1].seq > after["cursors"][1]


def test_a_run_that_was_under_way_is_lost_by_its_silence(url, empty, home, imported):
    with Registry.open(url) as registry:
        fill(registry, home)
        assert registry.run("4").effective_status == "running"
        registry.heartbeat("4")
    shift = lines(home / "runs" / "r-0004")
    old = "".join(json.dumps({**line, "at": line["at"] - 500}) + "\n" for line in shift)
    (home / "runs" / "r-0004" / "journal.jsonl").write_text(old)
    code, said = imported(empty, home / "runs" / "r-0004")
    assert (code, "kg, lost, step 0" in said) == (0, True)
    with Registry.open(empty) as registry:
        assert registry.run("4").effective_status == "lost"
        assert registry.claim(["lost"]).id == "r-0004"


def test_a_line_that_was_cut_is_left_out_and_the_next_write_mends_it(url, empty, home, imported):
    folder = home / "runs" / "r-0001"
    with Registry.open(url) as registry:
        fill(registry, home)
        path = folder / "journal.jsonl"
        last = path.read_bytes().splitlines(keepends=True)[-1]
        path.write_bytes(path.read_bytes()[:-10])
        assert b'"finished"' in last
        code, said = imported(empty, folder)
        number = len(lines_of(path))
        assert (code, f"left out: line {number} is truncated" in said) == (0, True)
        with Registry.open(empty) as other:
            assert other.run("1").status == "running"
        registry.results.add_event("1", "note", "after the cut")
        before = told(registry, "1")
    with Registry.open(f"sqlite:///{home}/third.db") as third:
        assert third.import_run(folder).left_out == ()
        assert told(third, "1") == before
    assert [file.name for file in folder.iterdir()] == ["journal.jsonl"]


def lines_of(path):
    return path.read_bytes().split(b"\n")


def test_lines_that_are_none_are_left_out(home, url, empty):
    folder = home / "runs" / "r-0002"
    with Registry.open(url) as registry:
        fill(registry, home)
        before = told(registry, "2")
    path = folder / "journal.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    wrong = [b"nonsense\n", b"[]\n", b'{"change":"x","at":1,"with":{}}\n', b"\xff\n"]
    wrong += [b'{"change":"event","at":1,"with":{}}\n', b'{"change":"set","at":"x","with":{}}\n']
    for step, value in (("x", 1.0), (1, "x")):
        fields = {"step": step, "time": 1.0, "values": {"a": value}, "seq": 1}
        wrong.append(json.dumps({"change": "metrics", "at": 1, "with": fields}).encode() + b"\n")
    path.write_bytes(b"".join([first, *wrong, *others]))
    with Registry.open(empty) as registry:
        found = registry.import_run(folder)
        assert len(found.left_out) == len(wrong)
        assert found.left_out[2] == "line 4: has the change 'x', which this version does not know"
        assert told(registry, "2") == before


def test_a_path_that_leaves_the_folder_is_left_out(home, url, empty, imported):
    folder = home / "runs" / "r-0003"
    with Registry.open(url) as registry:
        fill(registry, home)
        before = told(registry, "3")
    with (folder / "journal.jsonl").open("a") as file:
        for number, place in enumerate(("/etc/passwd", "../r-0001/spec.yaml", "a/../../b"), 90):
            fields = {"path": place, "kind": "x", "seq": number}
            file.write(json.dumps({"change": "artifact", "at": 1.0, "with": fields}) + "\n")
    code, said = imported(empty, folder)
    assert (code, said.count("is not a path inside the run's directory")) == (0, 3)
    assert everything(empty) == {"r-0003": before}


def test_a_line_that_the_tables_refuse_is_left_out_alone(home, url, empty, imported):
    folder = home / "runs" / "r-0003"
    with Registry.open(url) as registry:
        fill(registry, home)
        before = told(registry, "3")
    number = len(lines(folder)) + 1
    with (folder / "journal.jsonl").open("a") as file:
        fields = {"step": 1, "path": "a", "sha256": "x", "bytes": 1, "statistics": {}}
        fields["index"] = [{"row": 0, "nonsense": 1}]
        file.write(json.dumps({"change": "rollouts", "at": 1.0, "with": fields}) + "\n")
        wrong = {"before": None, "after": "asleep", "reason": None, "attempt": 1, "id": 10**6}
        file.write(json.dumps({"change": "moved", "at": 1.0, "with": wrong}) + "\n")
        file.write(json.dumps({"change": "set", "at": 1.0, "with": {"step": 10**30}}) + "\n")
    code, said = imported(empty, folder)
    assert code == 0, said
    assert f"{folder / 'journal.jsonl'}:" in said
    for line, kind in enumerate(("rollouts", "moved", "set"), number):
        assert f"left out: line {line}: its '{kind}' does not fit the registry: " in said
    assert everything(empty) == {"r-0003": before}


def submit(registry, folder):
    """Submits a first run with this folder."""
    registry.submit(digest="d", seed=0, **SUBMISSION)
    registry.update_run("1", directory=str(folder))


def record(registry, folder, step, *rows):
    """Records a step's rollouts, one tree per preview, whose file has the index."""
    index = [
        RolloutIndex(
            row=row,
            parent_row=None,
            tree=row,
            group=0,
            turn="answer",
            problem_id="p",
            reward=0.5,
            rewards={"accuracy": None},
            advantage=-0.25,
            n_tokens=3,
            finish_reason="stop",
            preview=preview,
        )
        for row, preview in enumerate(rows)
    ]
    table = add_index_column(pyarrow.table({"tree": list(range(len(rows)))}), index)
    path = folder / "rollouts" / f"{step}.parquet"
    sha256, size = write_body(path, table)
    registry.results.add_rollouts(
        "1",
        step,
        path=path,
        sha256=sha256,
        bytes=size,
        statistics={},
        index=index,
        in_body=True,
    )


def test_the_index_is_read_from_the_files_of_rollouts(home, url, empty, imported):
    folder = home / "runs" / "r-0001"
    with Registry.open(url) as registry:
        submit(registry, folder)
        for step in (1, 2, 3):
            record(registry, folder, step, "first", "half \ud800 a character, NUL \0 and \u202e")
        record(registry, folder, 2, "the step was taken again after a resume")
        before = told(registry, "1")
    assert all(line["with"].get("index") is None for line in lines(folder))
    assert imported(empty, folder)[0] == 0
    assert everything(empty) == {"r-0001": before}


def test_files_of_rollouts_that_are_lost_or_changed_are_named(home, url, empty, imported):
    folder = home / "runs" / "r-0001"
    with Registry.open(url) as registry:
        submit(registry, folder)
        for step in (1, 2, 3):
            record(registry, folder, step, "a")
        before = told(registry, "1")
    (folder / "rollouts" / "1.parquet").unlink()
    shutil.copy(folder / "rollouts" / "3.parquet", folder / "rollouts" / "2.parquet")
    with (folder / "rollouts" / "2.parquet").open("ab") as file:
        file.write(b"more")
    code, said = imported(empty, folder)
    assert code == 0
    assert "the rollouts of step 1: cannot read body 1.parquet: No such file" in said
    assert "the rollouts of step 2: body 2.parquet was recorded as" in said
    now = everything(empty)["r-0001"]
    for kept in ("index", "bodies"):
        assert now.pop(kept) == {3: before.pop(kept)[3]}
    assert now == before


def test_rollouts_that_were_removed_are_not_missed(home, url, empty, imported):
    folder = home / "runs" / "r-0001"
    with Registry.open(url) as registry:
        submit(registry, folder)
        record(registry, folder, 1, "a")
        registry.transition("1", ["submitted"], "stopped")
        delete_rollout_records(registry, "1")
        before = told(registry, "1")
    (folder / "rollouts" / "1.parquet").unlink()
    code, said = imported(empty, folder)
    assert code == 0 and "left out" not in said
    assert everything(empty) == {"r-0001": before}


def test_a_journal_that_begins_with_nonsense_makes_nothing(home, url, empty, imported):
    folder = home / "runs" / "r-0003"
    with Registry.open(url) as registry:
        fill(registry, home)
    path = folder / "journal.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    run = json.loads(first)
    odd = [{"id": True}, {"id": 10**30}, {"seed": "x"}, {"spec": []}, {"name": None}]
    for fields in odd:
        line = json.dumps({**run, "with": {**run["with"], **fields}}).encode() + b"\n"
        path.write_bytes(b"".join([line, *others]))
        code, said = imported(empty, folder)
        assert code == 5
        assert "1 of 1 folders hold no run that can be restored" in said
        assert f"{path} does not begin with a run: line 1: ha" in said
        assert everything(empty) == {}


def test_folders_without_a_journal_are_named(url, tmp_path, imported):
    old = tmp_path / "runs" / "r-0001"
    old.mkdir(parents=True)
    (old / "spec.json").write_text("{}")
    code, said = imported(url, tmp_path / "runs")
    assert code == 5
    assert f"{old} has no journal to rebuild its registry record from" in said
    (old / "journal.jsonl").write_text("")
    with Registry.open(url) as registry, pytest.raises(JournalError, match="it is empty"):
        registry.import_run(old)
    (old / "journal.jsonl").unlink()
    os.mkfifo(old / "journal.jsonl")
    with Registry.open(url) as registry, pytest.raises(JournalError, match="not a regular file"):
        registry.import_run(old)


def test_a_journal_that_cannot_be_written_stops_nothing(url, empty, home, monkeypatch, caplog):
    monkeypatch.setattr(journal, "PAUSE", 0.0)
    folder, away = home / "runs" / "r-0001", home / "away"
    with Registry.open(url) as registry:
        fill(registry, home)
        folder.rename(away)
        for step in range(3):
            registry.results.add_metrics("1", step, {"late": 1.0})
        assert [r.message.startswith(f"{folder}/journal.jsonl cannot") for r in caplog.records] == [
            True
        ]
        away.rename(folder)
        registry.results.add_metrics("1", 9, {"late": 1.0})
        before = told(registry, "1")
    with Registry.open(empty) as other:
        assert other.import_run(folder).left_out == ()
        assert told(other, "1") == before


FULL = """
import resource, signal, sys
from rlx_registry import Registry, journal
journal.PAUSE = 0.0
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Registry.open(sys.argv[1]) as registry:
    path = sys.argv[2]
    import os
    soft = os.path.getsize(path) + 700
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
    for step in range(8):
        registry.results.add_event("1", "note", "x" * 200)
    assert not os.path.exists(path), "it was never full"
"""


def test_a_disk_that_is_full_for_the_journal_alone(postgres, template, home):
    """The limit on the size of files stands for the disk; the database is a server's."""
    url = postgres.url(postgres.create(template))
    folder = home / "runs" / "r-0001"
    with Registry.open(url) as registry:
        fill(registry, home)
        processes(FULL, [(url, folder / "journal.jsonl")])
        assert [file.name for file in folder.iterdir()] == ["journal.unfinished.jsonl"]
        with Registry.open(f"sqlite:///{home}/other.db") as other:
            found = other.import_run(folder)
            assert "for example on a full disk" in found.left_out[0]
            assert 2 < len(other.results.events("1")) < 10
        registry.results.add_event("1", "note", "there is room again")
        assert [file.name for file in folder.iterdir()] == ["journal.jsonl"]
        before = told(registry, "1")
        assert len(before["events"]) == 11
    with Registry.open(f"sqlite:///{home}/third.db") as third:
        third.import_run(folder)
        assert told(third, "1") == before


def test_a_run_that_another_has_moved_is_told_so(registry, moved_run):
    """Claimed from a queue, or lost because another has its devices now."""
    how, folder = moved_run
    how(registry)
    assert lines(folder)[-1]["change"] == "moved"
    assert lines(folder)[-1]["with"]["after"] == registry.run("1").status != "running"


@pytest.fixture(params=["claim", "take"])
def moved_run(request, registry, home):
    """Something that moves run 1 without being a write of it, and the run's folder."""
    folder, devices = home / "runs" / "r-0001", DeviceRequest("one", ("gpu:0",), 1)
    for seed in range(2):
        registry.submit(digest="d", seed=seed, queue=seed == 0, **SUBMISSION)
    registry.update_run("1", directory=folder)
    if request.param == "claim":
        return lambda r: r.claim(["queued"]), folder
    registry.start("1", ["queued"], devices=devices)
    with registry.database.open_writer() as connection:
        connection.execute(update(models.run).where(models.run.c.id == 1).values(heartbeat=1.0))
    return lambda r: r.start("2", ["submitted"], devices=devices), folder


@pytest.fixture
def registry(url):
    with Registry.open(url) as opened:
        yield opened


def test_a_run_of_an_older_version_gets_a_journal(url, empty, home):
    with Registry.open(url) as registry:
        fill(registry, home)
        folder = home / "runs" / "r-0001"
        (folder / "journal.jsonl").unlink()
        registry.results.add_event("1", "note", "by the new version")
        before = told(registry, "1")
    with Registry.open(empty) as other:
        other.import_run(folder)
        assert told(other, "1") == before


def test_the_journal_of_another_run_is_put_aside(home):
    """A registry that was lost, and not imported, gives its numbers, and folders, again."""
    for name in ("one", "two"):
        with Registry.open(f"sqlite:///{home}/{name}.db") as registry:
            fill(registry, home)
            before = told(registry, "1")
    folder = home / "runs" / "r-0001"
    assert sorted(f.name for f in folder.iterdir()) == ["journal.jsonl", "journal.other.jsonl"]
    with Registry.open(f"sqlite:///{home}/third.db") as third:
        third.import_run(folder)
        assert told(third, "1") == before


MANY = """
import sys, time
from rlx_registry import Registry
url, begin, number = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
with Registry.open(url) as registry:
    time.sleep(max(0, begin - time.time()))
    for step in range(20):
        registry.results.add_metrics("1", step, {f"m{number}": step, "shared": number})
        registry.results.add_event("1", "note", f"{number} {step}")
        registry.update_run("1", step=step)
"""


def test_many_processes_write_one_journal(url, empty, home):
    import time

    with Registry.open(url) as registry:
        fill(registry, home)
        folder = home / "runs" / "r-0001"
        (folder / "journal.jsonl").unlink()  # each of them may be the one to write it anew
        processes(MANY, [(url, time.time() + 1.0, number) for number in range(4)])
        before = told(registry, "1")
    assert len(before["events"]) == 82
    with Registry.open(empty) as other:
        assert other.import_run(folder).left_out == ()
        assert told(other, "1") == before


values = st.dictionaries(st.sampled_from("abc"), st.floats())
writes = st.lists(st.tuples(st.integers(0, 3), values), max_size=8)


@given(writes=writes, cut=st.integers(0, 8))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_writes_come_back(tmp_path, writes, cut):
    """Also where a journal was written anew after any of them."""
    shutil.rmtree(tmp_path / "any", ignore_errors=True)
    folder = tmp_path / "any" / "run"
    folder.mkdir(parents=True)
    with Registry.open(f"sqlite:///{tmp_path}/any/one.db") as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
        registry.update_run("1", directory=folder)
        for number, (step, figures) in enumerate(writes):
            if number == cut:
                (folder / "journal.jsonl").unlink()
            registry.results.add_metrics("1", step, figures)
        registry.update_run("1", step=1)
        before = told(registry, "1")
    with Registry.open(f"sqlite:///{tmp_path}/any/two.db") as other:
        other.import_run(folder)
        assert told(other, "1") == before
    assert all(math.isfinite(value) for s in before["metrics"].values() for _, value in s)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = ("step", "time", "values", "missing", "seq", "id", "kind", "level", "message", "payload")
FIELDS += ("after", "before", "reason", "attempt", "path", "index", "directory", "request")
FIELDS += ("columns", "connection", "origins", "pid", "label", "suite", "n", "metrics", "sha256")
shaped = st.fixed_dictionaries(
    {
        "change": st.sampled_from([*KINDS, "run"]) | json_values,
        "at": st.floats() | st.just(10**400) | json_values,
        "with": st.dictionaries(st.sampled_from(FIELDS), json_values) | json_values,
    }
)
strange_lines = st.one_of(
    st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")),
    json_values.map(lambda value: json.dumps(value).encode()),
    shaped.map(lambda entry: json.dumps(entry).encode()),
    st.integers(1, 60_000).map(lambda depth: b"[" * depth + b"]" * depth),
)


@given(strange=st.lists(strange_lines, max_size=6), data=st.data())
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_line_of_another_shape_costs_a_sound_one(tmp_path, strange, data):
    shutil.rmtree(tmp_path / "any", ignore_errors=True)
    folder = tmp_path / "any" / "run"
    folder.mkdir(parents=True)
    with Registry.open(f"sqlite:///{tmp_path}/any/one.db") as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
        registry.update_run("1", directory=folder)
        for step in range(3):
            registry.results.add_event("1", "note", f"sound {step}")
    path = folder / "journal.jsonl"
    sound = path.read_bytes().splitlines()
    mixed = list(sound)
    for line in strange:
        mixed.insert(data.draw(st.integers(1, len(mixed))), line)
    path.write_bytes(b"\n".join(mixed) + b"\n")
    with Registry.open(f"sqlite:///{tmp_path}/any/two.db") as other:
        found = other.import_run(folder)
        notes = [e.message for e in other.results.events("1") if e.message.startswith("sound")]
    assert notes == ["sound 0", "sound 1", "sound 2"]
    assert all(mixed[int(re.findall("[0-9]+", why)[0]) - 1] in strange for why in found.left_out)
    unread = [line for line in strange if not isinstance(parsed(line), dict)]
    assert len(found.left_out) >= len(unread)


def parsed(line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
