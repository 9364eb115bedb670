"""The command line around a run: what it prints, how it ends, and what it leaves running."""

import re


def test_following_shows_the_start_the_stages_and_the_results(own_finished):
    """In a home of its own, in which no other run has stored the warm start."""
    out, err = own_finished.submitted.stdout, own_finished.submitted.stderr
    assert f"run     {own_finished.id}  (4 steps)" in out
    assert "held-out problems" in out
    assert "accuracy" in out
    assert "evaluation (after)" in err
    assert "100 steps of warm start, loss" in out
    assert re.search(r"^\d{4}-\S+ \S+  warm start  \d+/100  ", err, re.M)


def test_logs(own_finished, own_home):
    shown = own_home.rlx("logs", own_finished.id, "-n", "1000").stdout.splitlines()
    stamped = [line for line in shown if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line)]
    assert sum("  warm start  step " in line for line in stamped) >= 10
    ours = ("warm start  step ", "learner: ", "sampler: ", "step ", "done: ")
    assert [line for line in shown if line.startswith(ours)] == [], "each of rlx's has its time"
    kinds = [event["kind"] for event in own_home.json("logs", own_finished.id)]
    assert {"completed", "resources"} <= set(kinds)
    assert "report_failed" not in kinds


def test_pictures_are_drawn_when_asked_for_and_recorded(finished, home):
    done = home.rlx("status", finished.id, "--pictures")
    assert done.returncode == 0, done.stderr
    names = {f"pictures/{n}.{kind}" for n in ("reliability", "curves") for kind in ("png", "svg")}
    with home.registry() as registry:
        recorded = {a.path for a in registry.results.artifacts(finished.id) if a.kind == "picture"}
    assert recorded == names
    for name in names:
        content = (finished.root / name).read_bytes()
        assert content.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in content
        assert name in done.stdout


def test_a_scorer_that_fails_fails_the_run_with_its_reason(home):
    guest = {"name": "failing", "rewards.turn.guest": "{plugin: broken, turn: answer}"}
    failed, why = home.rlx("submit", home.yaml, sets={**home.small, **guest}), "out of order"
    assert failed.returncode == 1
    assert "✗" in failed.stderr and "guest" in failed.stderr and why in failed.stderr
    status = home.json("status", "failing")
    assert status["status"] == "failed" and why in status["reason"]
    assert why in home.rlx("logs", "failing").stdout


def test_a_run_that_never_learned_anything_has_failed(finished, home):
    dropped = "{plugin: broken, turn: answer, on_error: drop_sample}"
    sets = {**home.small, "name": "idle", "rewards.turn.guest": dropped}
    idle = home.rlx("submit", home.yaml, sets=sets)
    assert idle.returncode == 1
    assert "no step learned anything" in idle.stderr
    skipped = [e for e in home.json("logs", "latest") if e["kind"] == "step_skipped"]
    assert [e["level"] for e in skipped] == ["warning"] * 4
    assert all("the scorer is out of order" in e["message"] for e in skipped)
