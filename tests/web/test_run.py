"""The page of one run: how it stands, its curves, what was evaluated, what it was."""

import pytest
from shown import submit

from rlx.record.recorder import Recorder

RUN = "/runs/r-0002"


def test_the_time_left_is_that_of_the_last_steps(empty, registry):
    run = submit(registry, status="running")
    registry.update_run(run, step=4, steps_total=10)
    assert empty.twin("/runs/1")["run"]["eta"] is None, "nobody can say"
    registry.results.add_metrics(run, 1, {"perf/step_s": 1.0}, at=0.0)
    assert empty.twin("/runs/1")["run"]["eta"] is None, "one step has no pace"
    for step, at in ((2, 100.0), (4, 120.0)):
        registry.results.add_metrics(run, step, {"perf/step_s": 1.0}, at=at)
    assert empty.twin("/runs/1")["run"]["eta"] == pytest.approx(120 / 3 * 6)
    assert "Time left 4.0 min" in empty.page("/runs/1").cells()
    for step in range(5, 18):
        registry.results.add_metrics(run, step, {"perf/step_s": 1.0}, at=1000.0 + 2 * step)
    assert empty.twin("/runs/1")["run"]["eta"] == pytest.approx(12), "it looks back 12 steps"
    registry.transition(run, ["running"], "stopped")
    assert empty.twin("/runs/1")["run"]["eta"] is None


def test_steps_without_a_gradient_are_a_warning(empty, registry):
    run = submit(registry, status="running")
    shares = {"rollout/zero_signal_answer": 1.0, "train/grad_norm": 0.0}
    registry.results.add_metrics(run, 1, {**shares, "rollout/zero_signal_answer": 0.5})
    registry.update_run(run, step=1)
    assert ("p", "hidden", None) in empty.page("/runs/1").attributes
    for step in range(2, 7):
        registry.results.add_metrics(run, step, shares)
        registry.update_run(run, step=step)
    assert empty.twin("/runs/1")["idle_steps"] == 5
    page = empty.page("/runs/1")
    assert "No gradient: the last 5 steps changed nothing" in page.cells()
    assert ("p", "hidden", None) not in page.attributes
    assert empty.get("/runs/1/live.json").json()["idle_steps"] == 5


def test_a_warm_start_shows_its_loss_and_how_far_it_is(empty, registry):
    run = submit(registry, status="running")
    recorder = Recorder(registry, run, keep_bodies=False)
    for step, loss in ((1, 3.5), (2, 2.25), (3, 1.5)):
        recorder.warm_start({step: loss}, 9)
    page = empty.page("/runs/1")
    assert "Phase warm start 3/9" in page.cells()
    (section,) = empty.twin("/runs/1")["sections"]
    assert section["title"] == "Warm start"
    asked = {"name": ["warm_start/loss"]}
    curves = empty.get("/runs/1/curves.json", params=asked).json()["curves"]
    assert curves == {"warm_start/loss": [[1, 3.5], [2, 2.25], [3, 1.5]]}


def test_every_metric_is_drawn_once_under_its_section(plain, known):
    parts = plain.twin(RUN)["sections"]
    drawn = [name for s in parts for c in s["charts"] for name, _ in c["curves"]]
    assert sorted(drawn) == known.queries.metric_names("2")
    found = {s["title"]: {c["title"]: c["curves"] for c in s["charts"]} for s in parts}
    assert found["Reward"]["by component"] == [["rewards/plain/mean", "plain"]]
    assert found["Calibration"]["held out: accuracy"] == [["eval/held_out/accuracy", "held_out"]]
    assert found["Other metrics"] == {"odd": [["odd/plain", "plain"]]}
    page = plain.page(RUN)
    assert page.values("data-section") == [str(n) for n in range(len(parts))]
    for title in found:
        assert title in page.text


def test_evaluations_stand_side_by_side_with_what_training_changed(plain):
    table, probe = plain.twin(RUN)["evaluations"]
    assert (probe["suite"], [c["n"] for c in probe["columns"]]) == ("probe/plain", [6])
    assert [(c["label"], c["step"], c["n"]) for c in table["columns"]] == [
        ("before", 0, 600),
        ("after", 3, 600),
    ]
    rows = {row["name"]: row for row in table["rows"]}
    assert list(rows) == ["accuracy", "brier", "odd.plain"], "those that matter first"
    assert rows["accuracy"]["values"] == [0.25, 0.625]
    assert rows["accuracy"]["change"] == 0.375
    assert rows["accuracy"]["intervals"] == [
        [pytest.approx(0.15), pytest.approx(0.35)],
        [pytest.approx(0.525), pytest.approx(0.725)],
    ]
    assert rows["brier"]["intervals"] == [None, None]
    page = plain.page(RUN)
    for said in ("accuracy 0.25 0.15 – 0.35 0.625 0.525 – 0.725 +0.375", "Brier score 0.2 0.2 +0"):
        assert said in page.cells()
    assert "9 answers, 0.8 stated, 0.75 right" in page.text


def test_what_happened_and_what_it_was(plain):
    data, page = plain.twin(RUN), plain.page(RUN)
    assert [(e["kind"], e["level"], e["payload"]) for e in data["events"]] == [
        ("plain", "warning", {"payload": "plain"})
    ]
    assert [c["after"] for c in data["history"]] == ["submitted", "running"]
    said = {v["path"]: (v["value"], v["origin"]) for v in data["values"]}
    assert said["note"] == ("plain", "--set plain")
    assert said["estimator.eps"] == (1e-6, "default")
    assert said["mask.strategy"] == ("turn_spans", "default")
    assert "estimator.eps 1e-06 default" in page.cells()
    assert "mask.strategy turn_spans default" in page.cells()
    assert data["yaml"] == "name: plain\n" and "name: plain\n" in page.text
    assert data["code"] == {"commit": "plain"} and data["environment"] == {"torch": "plain"}
    assert (data["checkpoints"][0]["path"], data["artifacts"][0]["path"]) == (
        "checkpoints/3",
        "spec.json",
    )
    assert data["rollout_steps"] == {"first": 1, "last": 3, "count": 3}
    assert f"{RUN}/rollouts/3" in page.values("href")


def commands(page):
    """What the page's forms ask of a run; its note is no command."""
    return [action for action in page.values("action") if not action.endswith("/note")]


def test_what_a_terminal_does_with_it(plain, filled):
    going, ended = (plain.twin(f"/runs/{n}") for n in (2, 1))
    assert going["commands"]["reproduce"] == f"rlx submit {filled}/runs/r-0002/spec.json --again"
    assert "resume" not in going["commands"] and "resume" not in ended["commands"]
    link = "http://127.0.0.1:5000/#/experiments/1/runs/m1?workflowType=machine_learning"
    assert going["tracker"] == {"url": link, "store": "sqlite:///mlflow.db"}
    page = plain.page(RUN)
    assert link in page.values("href")
    assert commands(page) == ["/runs/r-0002/stop"], "what goes on can be stopped, not resumed"
    assert "/runs/r-0001/stop" not in plain.page("/runs/1").values("action")


def test_what_a_page_has_not_seen_yet(empty, registry):
    run = submit(registry, status="running")
    seen = empty.twin("/runs/1")["seq"]
    registry.results.add_event(run, "old", "seen")
    event = empty.twin("/runs/1")["events"][-1]["id"]
    registry.results.add_metrics(run, 6, {"train/reward": 0.5})
    registry.results.add_event(run, "note", "news")
    registry.update_run(run, step=6)
    live = empty.get(f"/runs/1/live.json?after={seen}&event={event}").json()
    assert live["points"] == {"train/reward": [[6, 0.5]]}
    assert [e["message"] for e in live["events"]] == ["news"]
    assert live["run"]["step"] == 6
    nothing = empty.get(f"/runs/1/live.json?after={live['seq']}&event=999").json()
    assert (nothing["points"], nothing["events"]) == ({}, [])
    assert nothing["seq"] == live["seq"]


def test_a_run_begins_with_whether_it_learns(empty, registry):
    run = submit(registry)
    assert "does it learn" not in empty.page("/runs/1").text
    for step in (1, 2, 3):
        registry.results.add_metrics(run, step, {"rewards/accuracy/mean": step / 8})
    for label, step, accuracy in (("before", 0, 0.25), ("after", 3, 0.5)):
        registry.results.add_evaluation(run, step, label, "held_out", 8, {"accuracy": accuracy})
    data = empty.twin("/runs/1")["headline"]
    assert data["curve"]["points"] == [[1, 0.125], [2, 0.25], [3, 0.375]]
    assert (data["held_out"]["values"], data["held_out"]["change"]) == ([0.25, 0.5], 0.25)
    text = empty.page("/runs/1").cells()
    assert "0.125 → 0.375 rewards/accuracy/mean steps 1 to 3" in text
    assert "0.25 → 0.5 accuracy of held-out problems change +0.25" in text
