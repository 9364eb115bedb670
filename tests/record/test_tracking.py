"""Sending runs from the cursor: nothing is lost, nothing is sent twice, no run waits."""

import threading

import pytest
from submissions import submit

from rlx.plugin import Tracker
from rlx.record.tracker import RunSender, TrackerThreads, TrackerUnavailableError, update_trackers
from rlx.stopwatch import Clock
from rlx_registry import Registry

MEMORY = {"memory": {}}
"""Settings of the trackers of a run."""


class Remembering(Tracker):
    """A tracker in memory, which can be away."""

    title = "Memory"

    def __init__(self):
        super().__init__(None)
        self.points, self.calls, self.files, self.status = None, [], [], None
        self.is_away = False

    def _answer(self):
        if self.is_away:
            raise OSError("it is away")

    def open_run(self, run):
        self._answer()
        if self.points is None:
            self.points = {}
        self.status = run.status
        return None if self.points else 0

    def add_points(self, points):
        self._answer()
        self.calls.append([p.seq for p in points])
        self.points |= {(p.name, p.step): p.value for p in points}
        return True

    def finish(self, run, files):
        self._answer()
        self.files += [path for _, path in files]
        self.status = run.status


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/registry.db"


@pytest.fixture
def registry(url):
    with Registry.open(url) as opened:
        yield opened


@pytest.fixture
def run_id(registry, tmp_path):
    run = submit(registry, name="rlcr")
    (tmp_path / run.id).mkdir()
    registry.update_run(run.id, directory=tmp_path / run.id)
    registry.transition(run.id, ["submitted"], "running")
    return run.id


@pytest.fixture
def tracker(monkeypatch):
    """The tracker of kind `memory`, which is the one that every run has."""
    found = Remembering()
    monkeypatch.setattr(
        "rlx.record.tracker.open_tracker", lambda settings: settings.get("is", found)
    )
    monkeypatch.setattr("rlx.record.tracker.open_trackers", lambda run: {"memory": found})
    return found


@pytest.fixture
def sender(registry, run_id, tracker):
    return RunSender(registry, run_id, "memory", tracker)


def add(registry, run_id, steps, factor=1.0):
    for step in steps:
        registry.results.add_metrics(run_id, step, {"train/loss": factor * step})


def losses(steps, factor=1.0):
    return {("train/loss", step): factor * step for step in steps}


def test_a_backlog_goes_in_few_calls_in_the_order_of_writing(
    registry, run_id, sender, tracker, monkeypatch
):
    monkeypatch.setattr("rlx.record.tracker.ROWS_AT_ONCE", 4)
    add(registry, run_id, range(10))
    assert (sender.send(), sender.send()) == (10, 0)
    assert tracker.calls == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    add(registry, run_id, [10])
    assert sender.send() == 1
    assert tracker.points == losses(range(11))


def test_nothing_is_lost_while_the_tracker_is_away(registry, run_id, sender, tracker):
    add(registry, run_id, range(3))
    sender.send()
    tracker.is_away = True
    add(registry, run_id, range(3, 6))
    with pytest.raises(TrackerUnavailableError):
        sender.send()
    assert tracker.points == losses(range(3))
    tracker.is_away = False
    tracker.points = None  # it lost its store, too
    assert sender.send() == 6
    assert tracker.points == losses(range(6))


def test_an_end_is_sent_with_files_and_figures_and_noted(registry, run_id, sender, tracker):
    add(registry, run_id, range(2))
    registry.results.add_artifact(run_id, "plots/curve.svg", "picture")
    registry.results.add_metrics(run_id, 1, {"eval/own/ece": 0.3})
    for suite in ("own", "test"):
        figures = {"ece": 0.3, "auroc": None, "by_stratum": {"2": {"ece": 0.1}}}
        registry.results.add_evaluation(run_id, 1, "after", suite, 600, figures)
    sender.send()
    assert not sender.is_behind, "its supervisor sends a running run"
    registry.transition(run_id, ["running"], "finished")
    assert sender.is_behind
    assert sender.catch_up() == 0
    assert not sender.is_behind
    assert (tracker.status, tracker.files) == ("finished", ["plots/curve.svg"])
    assert tracker.points[("eval/test/ece", 1)] == 0.3
    assert {name for name, _ in tracker.points} == {"train/loss", "eval/own/ece", "eval/test/ece"}
    registry.results.add_artifact(run_id, "plots/more.svg", "picture")
    sender.catch_up()
    assert tracker.files == ["plots/curve.svg", "plots/more.svg"], "each once"
    registry.join(run_id, "seeds")
    assert sender.is_behind
    sender.catch_up()
    registry.results.add_metrics(run_id, 9, {"train/loss": 0.5})
    assert sender.is_behind
    registry.transition(run_id, ["finished"], "running")
    sender.send()
    assert tracker.status == "running", "each attempt is started anew"


def test_what_is_added_to_an_ended_run_is_sent_or_a_warning(registry, run_id, tracker):
    said = []

    def report(text, *, err=False):
        said.append(text)

    add(registry, run_id, [1])
    update_trackers(registry, registry.run(run_id), report)
    assert tracker.points is None, "its supervisor sends a running run"
    registry.transition(run_id, ["running"], "finished")
    tracker.is_away = True
    update_trackers(registry, registry.run(run_id), report)
    assert said == ["warning: memory was not updated: Memory: it is away; the registry has it"]
    tracker.is_away = False
    update_trackers(registry, registry.run(run_id), report)
    assert (tracker.points, len(said)) == (losses([1]), 1)


@pytest.fixture
def unhurried(monkeypatch):
    """Threads that wait neither for a step nor between two of them; the pauses between tries."""
    pauses = []
    monkeypatch.setattr("rlx.record.tracker.STEP_WAIT", 0)
    monkeypatch.setattr("rlx.record.tracker.SEND_EVERY", 0.0)
    return Clock(pause=pauses.append), pauses


@pytest.mark.usefixtures("unhurried")
def test_the_thread_sends_while_the_run_goes_on_and_its_end(url, registry, run_id, tracker):
    sent = threading.Event()
    add_points = tracker.add_points
    tracker.add_points = lambda rows: (add_points(rows), sent.set())[0]
    add(registry, run_id, [1])
    thread = TrackerThreads(url, run_id, MEMORY, lambda: True)
    assert sent.wait(60)
    add(registry, run_id, [2])
    registry.transition(run_id, ["running"], "finished")
    assert thread.end() is None
    assert (tracker.points, tracker.status) == (losses([1, 2]), "finished")


def test_a_tracker_that_stays_away_is_said_at_the_end(
    url, registry, run_id, tracker, unhurried, capsys
):
    clock, pauses = unhurried
    tracker.is_away = True
    add(registry, run_id, [1])
    thread = TrackerThreads(url, run_id, MEMORY, lambda: True, clock)
    registry.transition(run_id, ["running"], "finished")
    assert thread.end() == (
        "memory could not be reached; the registry is complete, and `rlx check --repair` sends the "
        "rest"
    )
    assert "tracker: Memory: it is away" in capsys.readouterr().out
    assert pauses == [1, 2, 4]


@pytest.mark.usefixtures("unhurried")
def test_a_tracker_that_hangs_keeps_nobody(url, registry, run_id, tracker):
    let_go, sent = threading.Event(), threading.Event()
    stuck = Remembering()
    stuck.open_run = lambda run: let_go.wait(60)
    add_points = tracker.add_points
    tracker.add_points = lambda points: (add_points(points), sent.set())[0]
    add(registry, run_id, [1])
    thread = TrackerThreads(url, run_id, {"stuck": {"is": stuck}, **MEMORY}, lambda: True)
    assert sent.wait(60), "the other one does not wait for it"
    assert "stuck did not answer in 0 s" in thread.end(seconds=0)
    let_go.set()
    thread.leave()


@pytest.mark.usefixtures("unhurried")
def test_nothing_is_sent_once_the_disk_is_full(url, registry, run_id, tracker):
    add(registry, run_id, [1])
    thread = TrackerThreads(url, run_id, MEMORY, lambda: False)
    assert "memory is out of date: the disk is full" in thread.end()
    assert tracker.points is None
