"""Trackers as plugins: which an experiment may name, and one of another distribution."""

import pytest
from guests import installed
from pydantic import ValidationError
from submissions import submit

from rlx.record import (
    TrackerUnavailableError,
    list_deleting_trackers,
    list_tracker_pages,
    open_senders,
)
from rlx.record.tracker import read_tracked_run
from rlx.spec import TRACKERS, TrackingSpec
from rlx.testing import check_tracker
from rlx_registry import Registry

MODULE = '''
from typing import Literal
from rlx.plugin import Tracker, TrackerPlugin

class Lines(TrackerPlugin):
    """Writes a line per value."""
    implementation = "page_lines:LineTracker"
    kind: Literal["lines"] = "lines"
    file: str = "lines.txt"

class LineTracker(Tracker):
    title = "Lines"

    def open_run(self, run):
        self.file = run.folder / self.settings.file
        self.file.write_text(f"{run.tags['rlx.run_id']} of {run.project}\\n")
        return 0

    def add_points(self, points):
        with self.file.open("a") as out:
            out.writelines(f"{p.name} {p.step} {p.value:g}\\n" for p in points)
        return True
'''


@pytest.fixture
def registry(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        yield registry


def submit_with(registry, tmp_path, *trackers):
    tracking = {"mlflow": None, "experiment": "paper", "trackers": list(trackers)}
    run = submit(registry, name="rlcr", spec={"tracking": tracking, "token": "https://a:s3cret@b"})
    (tmp_path / run.id).mkdir()
    registry.update_run(run.id, directory=tmp_path / run.id)
    registry.transition(run.id, ["submitted"], "finished")
    return registry.run(run.id)


def test_one_of_another_distribution_is_sent_what_mlflow_is(registry, tmp_path, monkeypatch):
    points = "[rlx.trackers]\nlines = page_lines:Lines\n"
    with installed(tmp_path, monkeypatch, "rlx-lines", points, page_lines=MODULE):
        settings = TrackingSpec(trackers=[{"kind": "lines", "file": "a.txt"}]).trackers[0]
        check_tracker(type(settings))
        run = submit_with(registry, tmp_path, settings.model_dump())
        registry.results.add_metrics(run.id, 1, {"eval/pass@8": 0.5})
        (sender,) = open_senders(registry, run)
        assert sender.catch_up() == 1
        written = (tmp_path / run.id / "a.txt").read_text()
        assert written == f"{run.id} of paper\neval/pass_at_8 1 0.5\n"
        assert "s3cret" not in str(read_tracked_run(registry, run.id))
    assert registry.results.mirror_cursor(run.id, "lines") == 1


def test_one_that_cannot_be_used_here_holds_up_no_other(registry, tmp_path):
    run = submit_with(registry, tmp_path, {"kind": "gone", "x": 1}, {"kind": "tensorboard"})
    gone, tensorboard = open_senders(registry, run)
    for ask in (gone.send, gone.has_run):
        with pytest.raises(TrackerUnavailableError, match=r"gone: .*'gone'"):
            ask()
    assert list_tracker_pages(run) == {
        "tensorboard": f"tensorboard --logdir {tmp_path}/home/tensorboard"
    }
    assert list_deleting_trackers(run) == ["tensorboard"]
    assert tensorboard.has_run() is False
    tensorboard.discard()


def test_a_list_names_each_once_and_not_mlflow():
    assert [t.kind for t in TrackingSpec(trackers=["tensorboard", "wandb"]).trackers] == [
        "tensorboard",
        "wandb",
    ]
    for trackers, says in (
        (["wandb", {"kind": "wandb", "mode": "offline"}], "wandb is named twice"),
        ([{"kind": "mlflow", "url": "sqlite:///a.db"}], "set its address, `tracking.mlflow`"),
    ):
        with pytest.raises(ValidationError, match=says):
            TrackingSpec(trackers=trackers)
    for settings in TRACKERS.shipped.values():
        check_tracker(settings)
