"""The command line around a run: what it prints, how it ends, and what it leaves running."""

import re

# What a finished run says ------------------------------------------------------------------------


def test_following_shows_the_start_the_stages_and_the_results(finished):
    out, err = finished.submitted.stdout, finished.submitted.stderr
    assert f"run     {finished.id}  (4 steps)" in out
    assert "held-out problems" in out
    assert "accuracy" in out
    assert "evaluation (after)" in err
    assert "100 steps of warm start, loss" in out
    assert re.search(r"^\d{4}-\S+ \S+  warm start  \d+/100  ", err, re.M)


def test_status_as_json(finished):
    status = finished.status
    assert (status["run"], status["status"], status["step"]) == ("r-0001", "finished", 4)
    assert (status["seed"], status["spec_digest"]) == (0, finished.record.digest)
    assert status["reason"] is None
    for label in ("before", "after"):
        figures = status["evaluation"][label]
        assert figures["n"] == 30
        assert 0 <= figures["accuracy"] <= 1
        assert 0 <= figures["brier"] <= 1
        assert 0 <= figures["ece"] <= 1
        # With one label alone there is nothing to tell apart.
        assert (figures["auroc"] is None) == (figures["accuracy"] in (0, 1))


def test_runs_as_json(finished):
    assert finished.listed == [finished.status]


def test_samples_as_json(finished, home):
    samples = home.json("samples", finished.id, "--step", "3", "-n", "500")
    assert len(samples) == 4 * 4 * (1 + 4)
    assert {s["turn"] for s in samples} == {"answer", "confidence"}
    answer = next(s for s in samples if s["turn"] == "answer")
    assert set(answer["rewards"]) == {"accuracy", "format", "arithmetic"}
    (one,) = {s["tree"] for s in home.json("samples", finished.id, "--group", "2")}
    assert one == 2
    assert home.rlx("samples", finished.id, "--step", "9").returncode == 2


def test_logs(finished, home):
    shown = home.rlx("logs", finished.id, "-n", "1000").stdout.splitlines()
    stamped = [line for line in shown if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line)]
    assert sum("  warm start  step " in line for line in stamped) >= 10
    ours = ("warm start  step ", "learner: ", "sampler: ", "step ", "done: ")
    assert [line for line in shown if line.startswith(ours)] == [], "each of rlx's has its time"
    kinds = [event["kind"] for event in home.json("logs", finished.id)]
    assert {"completed", "resources"} <= set(kinds)
    assert "report_failed" not in kinds


def test_submitting_the_same_again_does_nothing(finished, home):
    again = home.rlx("submit", home.yaml, sets=home.small)
    assert again.returncode == 0
    assert f"nothing to do: spec {finished.record.digest}, seed 0 already finished" in again.stdout
    quiet = home.rlx("submit", home.yaml, "-q", sets=home.small)
    assert (quiet.returncode, quiet.stdout) == (0, f"{finished.id}\n")
    assert home.run(finished.id) == finished.record


# Three others ------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_following_and_not_the_run(others, home):
    interrupted = others["interrupted"]
    assert interrupted.returncode == 130
    assert f"detached; {others['named']['twins']} keeps running" in interrupted.stderr
    assert "Traceback" not in interrupted.stderr
    assert others["status_then"] == "running"
    run = home.run(others["named"]["twins"])
    assert (run.status, run.step) == ("finished", 4)


def test_two_ranks_sample_what_one_samples(others, finished, home):
    run = home.run(others["named"]["twins"])
    assert run.digest == finished.record.digest
    (_, twins, _), *_ = home.bodies(run)
    (_, alone, _), *_ = home.bodies(finished.record)

    def sampled(trees):
        return [[s["token_ids"] for s in tree["segments"]] for tree in trees]

    def advantages(trees):
        return [[row["advantages"] for row in tree["rows"]] for tree in trees]

    assert sampled(twins) == sampled(alone)
    assert advantages(twins) == advantages(alone)


def test_a_scorer_that_fails_fails_the_run_with_its_reason(others, home):
    failed = others["failed"]
    assert failed.returncode == 1
    assert "✗" in failed.stderr
    assert "guest" in failed.stderr
    assert "the scorer is out of order" in failed.stderr
    status = home.json("status", others["named"]["failing"])
    assert status["status"] == "failed"
    assert "the scorer is out of order" in status["reason"]
    assert "the scorer is out of order" in home.rlx("logs", others["named"]["failing"]).stdout


def test_a_run_that_never_learned_anything_has_failed(finished, home):
    dropped = "{plugin: broken, turn: answer, on_error: drop_sample}"
    sets = {**home.small, "name": "idle", "rewards.turn.guest": dropped}
    idle = home.rlx("submit", home.yaml, sets=sets)
    assert idle.returncode == 1
    assert "no step learned anything" in idle.stderr
    skipped = [e for e in home.json("logs", "latest") if e["kind"] == "step_skipped"]
    assert [e["level"] for e in skipped] == ["warning"] * 4
    assert all("the scorer is out of order" in e["message"] for e in skipped)


def test_a_run_that_is_stopped_leaves_nothing_running(others, home):
    assert others["started"].returncode == 0
    assert others["stopped"].returncode == 0
    run = home.run(others["named"]["long"])
    assert (run.status, run.reason) == ("stopped", "stopped on request")
    assert run.step < run.steps_total
    assert len(others["family"]) >= 3, "a supervisor, a rank and its scorer"
    assert set(others["family"]).isdisjoint(home.running())


def test_a_run_may_be_stopped_before_it_has_begun(others, home):
    assert others["stopped_early"].returncode == 0
    run = home.run(others["hasty"])
    assert (run.status, run.step) == ("stopped", 0)


def test_nothing_is_left_running(others, home):
    assert home.processes() == []
