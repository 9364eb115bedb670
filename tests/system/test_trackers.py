"""What TensorBoard's and Weights & Biases' own libraries read is what the registry holds: after
each was away, after a kill, and after a store was damaged or lost."""

import json
import os
import shutil
import signal
import struct
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import create_autospec

import pytest
from patience import find_free_port, signal_processes
from submissions import submit

from rlx.record import TrackerUnavailableError, open_senders
from rlx.record.tracker import make_legal_key
from rlx_registry import Registry

LIBRARIES = ("tensorboard", "wandb")
TRACKERS = [{"kind": "tensorboard"}, {"kind": "wandb", "mode": "offline"}]
pytestmark = [
    pytest.mark.skipif(
        not all(map(find_spec, LIBRARIES)) and os.environ.get("RLX_CI") != "1",  # else they fail
        reason="pip install 'rlx[tensorboard,wandb]'",
    ),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]


def read_tensorboard(folder):
    """Every point of a run's event files, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (found,) = folder.glob("*/*")
    events = EventAccumulator(str(found), size_guidance={"scalars": 0})
    events.Reload()
    names = events.Tags()["scalars"]
    points = [((name, event.step), event.value) for name in names for event in events.Scalars(name)]
    assert len(dict(points)) == len(points), "each point once"
    return dict(points)


def read_wandb(folder):
    """Every point of a run's offline store, by name and step, and the run's id, of its one run."""
    (store,) = folder.glob("wandb/offline-run-*/*.wandb")
    records = list(read_wandb_records(store.read_bytes()))
    points = []
    for record in records:
        row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        step = row.pop("step", None)
        names = [name for name in row if not name.startswith("_")]
        points += [((name, int(step)), json.loads(row[name])) for name in names]
    assert len(dict(points)) == len(points), "each point once"
    return dict(points)


def read_wandb_records(data):
    """The records of a store, in LevelDB's log format: blocks of 32 KiB, after seven bytes."""
    from wandb.proto import wandb_internal_pb2

    at, whole = 7, b""
    while at + 7 <= len(data):
        if (room := 2**15 - at % 2**15) < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def read_registry(registry, run_id):
    series = registry.results.metrics(run_id)
    return {(make_legal_key(name), step): value for name in series for step, value in series[name]}


def in_single_precision(points):
    return {key: struct.unpack("f", struct.pack("f", value))[0] for key, value in points.items()}


def test_a_run_whose_trackers_were_away_and_that_was_killed(own):
    (own.path).mkdir(exist_ok=True)
    blocked = own.path / "tensorboard"
    blocked.touch()  # a file where there should be a folder
    sets = {
        **own.small,
        **own.unhurried,
        **own.held,
        "phases.1.steps": 4,
        "runner.checkpoint.every": 1,
        "tracking.trackers": json.dumps(TRACKERS),
    }
    run_id = own.submit("-d", sets=sets)
    folder = Path(own.run(run_id).directory)
    (folder / "wandb").touch()
    own.until(lambda: own.run(run_id).step >= 2, "some steps")
    own.hold()
    log = folder / "run.log"
    for title in ("TensorBoard's files", "Weights & Biases"):
        own.until(lambda title=title: f"tracker: {title}" in log.read_text(), "it to be away")
    blocked.unlink()
    (folder / "wandb").unlink()

    def have_begun():
        with own.registry() as registry:
            return all(registry.results.mirror_cursor(run_id, kind) for kind in LIBRARIES)

    own.until(have_begun, "both to be sent something")
    signal_processes(own.processes(), signal.SIGKILL)
    own.until(lambda: not own.processes(), "every process to end")
    own.release()
    assert own.rlx("resume", run_id, "-q").returncode == 0
    own.until(lambda: not own.processes(), "every process to end")
    assert own.run(run_id).status == "finished"
    with own.registry() as registry:
        truth = read_registry(registry, run_id)
    assert {step for _, step in truth} >= set(range(1, 7))
    assert read_wandb(folder) == truth
    assert read_tensorboard(own.path / "tensorboard") == in_single_precision(truth)
    status = own.rlx("status", run_id).stdout
    assert f"tensorboard --logdir {own.path}/tensorboard" in status
    assert f"wandb sync {folder}/wandb/offline-run-*" in status


@pytest.fixture
def registry(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        yield registry


def test_a_store_that_was_damaged_or_lost_is_written_anew(registry, tmp_path):
    import wandb  # imported here: it takes half a second

    tracking = {"mlflow": None, "trackers": TRACKERS}
    run = submit(registry, name="rlcr", spec={"tracking": tracking, "optimizer": {"lr": 1e-5}})
    folder, logs = tmp_path / run.id, tmp_path / "home" / "tensorboard"
    folder.mkdir()
    registry.update_run(run.id, directory=folder)
    registry.transition(run.id, ["submitted"], "running")

    def add(*steps, factor=1.0):
        for step in steps:
            values = {f"train/loss_{i}": factor / (step + i + 1) for i in range(40)}
            registry.results.add_metrics(
                run.id, step, {**values, "eval/pass@8": 0.1}, at=1e9 + step
            )

    def send():
        """As another process does."""
        wandb.teardown()
        for sender in open_senders(registry, registry.run(run.id)):
            sender.catch_up()

    add(*range(50))
    first = open_senders(registry, registry.run(run.id))
    assert [sender.send() for sender in first] == [2050, 2050]
    tensorboard = first[0]
    (events,) = logs.glob("*/*/events*")
    with events.open("ab") as file:
        file.write(b"\x18\0\0\0\0\0\0\0half")  # of a record, as a kill leaves it
    add(48, 49, factor=2.0)
    send()
    truth = read_registry(registry, run.id)
    assert read_tensorboard(logs) == in_single_precision(truth)
    add(50)
    assert tensorboard.send() == 41, "into the file that the other process began"
    for lost in (logs, folder / "wandb"):
        shutil.rmtree(lost)
    assert tensorboard.send() == 0, "nothing is new"
    add(51)
    assert tensorboard.send() == len(read_registry(registry, run.id))

    registry.transition(run.id, ["running"], "finished")
    (folder / "pictures").mkdir()
    shutil.copy(Path(__file__).parents[2] / "docs" / "reliability.png", folder / "pictures")
    for name in ("reliability.png", "gone.png"):
        registry.results.add_artifact(run.id, f"pictures/{name}", "picture")
    send()
    truth = read_registry(registry, run.id)
    assert read_wandb(folder) == truth
    assert read_tensorboard(logs) == in_single_precision(truth)
    (events,) = logs.glob("*/*/events*")
    assert b"rlx.spec_digest" in events.read_bytes() and b"optimizer.lr" in events.read_bytes()
    assert b"\x89PNG" in events.read_bytes()
    assert [sender.has_run() for sender in open_senders(registry, run)] == [True, True]
    registry.results.add_metrics(run.id, 51, {"eval/pass@8": 0.3})  # evaluated again
    send()
    assert read_wandb(folder)["eval/pass_at_8", 51] == 0.3
    tensorboard.discard()
    assert not list(logs.glob("*/*"))


def test_a_server_of_wandb_is_away_and_then_has_some_points(registry, tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{find_free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("rlx.record.wandb_tracker.INIT_SECONDS", 1)
    run = submit(registry, spec={"tracking": {"trackers": [{"kind": "wandb", "entity": "ann"}]}})
    registry.update_run(run.id, directory=tmp_path)
    registry.transition(run.id, ["submitted"], "running")
    for step in range(3):
        values = {"train/loss": 1 / (step + 1), "eval/pass@8": step / 7}
        registry.results.add_metrics(run.id, step, values, at=1e9 + step)
    (sender,) = open_senders(registry, registry.run(run.id))
    for _ in range(2):
        with pytest.raises(TrackerUnavailableError, match=r"Weights & Biases \(online\): "):
            sender.catch_up()
    has = {"resumed": True, "starting_step": 3, "dir": str(tmp_path), "summary": {}}
    opened = create_autospec(wandb.Run, instance=True, **has)
    asked = create_autospec(wandb.init, return_value=opened)
    monkeypatch.setattr(wandb, "init", asked)
    assert sender.send() == 4, "what the server has is not sent again"
    assert asked.call_args.kwargs["settings"].resume == "allow"
    opened.starting_step = 7
    registry.transition(run.id, ["running"], "finished")
    sender.catch_up()
    rows = [(call.args[0], call.kwargs["step"]) for call in opened.log.call_args_list]
    points = {(name, row["step"]): row[name] for row, _ in rows for name in row if "/" in name}
    expected = read_registry(registry, run.id)
    assert points == {key: value for key, value in expected.items() if key[1] > 0}
    assert [seq for _, seq in rows] == [4, 6]
    opened.finish.assert_called_with(exit_code=0)
    assert not sender.is_behind
