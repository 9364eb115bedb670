"""Runs: submission, look-up, states."""

import dataclasses
import time

import pytest
from submissions import silence

from rlx_registry import AmbiguousNameError, NotFoundError, Registry, RegistryDatabaseError

SUBMISSION = {
    "digest": "d1",
    "seed": 0,
    "name": "rlcr",
    "spec": {"model": {"kind": "tiny"}},
    "yaml": "name: rlcr\n",
    "plugins": [{"name": "countdown", "version": "0.1.0"}],
    "code": {"commit": "abc"},
    "environment": {"torch": "2.13"},
}


@pytest.fixture
def registry(url):
    with Registry.open(url) as opened:
        yield opened


def submit(registry, **changes):
    return registry.submit(**{**SUBMISSION, **changes})


def test_a_submitted_run_holds_what_was_submitted(registry):
    before = time.time()
    run, created = submit(registry)
    assert created
    assert {name: getattr(run, name) for name in SUBMISSION} == SUBMISSION
    assert (run.id, run.status, run.step, run.attempt) == ("r-0001", "submitted", 0, 0)
    assert before <= run.created <= time.time()
    assert (run.started, run.ended, run.steps_total, run.directory) == (None, None, None, None)
    assert registry.run("r-0001") == run
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.status = "running"


@pytest.mark.parametrize("path", [[], ["running"], ["running", "finished"]])
def test_the_same_spec_and_seed_is_one_run_unless_another_is_asked_for(registry, path):
    first, _ = submit(registry)
    for status in path:
        assert registry.transition(first.id, [registry.run(first.id).status], status)
    again, created = submit(registry)
    assert (again.id, created) == (first.id, False)
    assert submit(registry, seed=1)[0].id == "r-0002"
    assert submit(registry, digest="d2")[0].id == "r-0003"
    assert submit(registry, name="another name")[0].id == "r-0004"
    changed = [{"name": "countdown", "version": "0.2.0"}]
    assert submit(registry, plugins=changed)[0].id == "r-0005"
    assert submit(registry)[0].id == first.id
    again, _ = submit(registry, again=True)
    assert submit(registry)[0].id == again.id == "r-0006"


@pytest.mark.parametrize("end", ["failed", "stopped", "lost"])
def test_a_run_that_came_to_nothing_does_not_block(registry, end):
    first, _ = submit(registry)
    registry.transition(first.id, ["submitted"], end)
    assert not registry.heartbeat(first.id)
    assert submit(registry)[1]


@pytest.mark.parametrize("status", ["submitted", "running"])
def test_a_silent_run_is_lost_to_every_reader_and_does_not_block(registry, status):
    run, _ = submit(registry)
    if status == "running":
        registry.transition(run.id, ["submitted"], "running")
    silence(registry, 1, 119)
    assert registry.run(run.id).effective_status == status
    assert not submit(registry)[1]
    silence(registry, 1, 121)
    silent = registry.run(run.id)
    assert (silent.status, silent.effective_status) == (status, "lost")
    assert [r.id for r in registry.runs(statuses=["lost"])] == [run.id]
    assert registry.runs(statuses=[status]) == []
    assert registry.heartbeat(run.id)
    assert registry.run(run.id).effective_status == status
    silence(registry, 1, 121)
    assert submit(registry)[0].id == "r-0002"


def test_references(registry):
    with pytest.raises(NotFoundError, match="has no runs yet"):
        registry.run("latest")
    for seed in range(12):
        submit(registry, seed=seed, name=f"name{seed // 2}" if seed < 4 else f"only{seed}")
    for ref in ("r-0007", "r-7", "7", "007", "only6"):
        assert registry.run(ref).id == "r-0007"
    assert registry.run("latest").id == "r-0012"
    with pytest.raises(
        AmbiguousNameError, match=r"several runs are named 'name1': r-0004, r-0003$"
    ):
        registry.run("name1")
    with pytest.raises(NotFoundError, match=r"no run 'r-0042'; nearest: r-0012, r-0011, r-0010$"):
        registry.run("r-0042")
    with pytest.raises(NotFoundError, match="no run 'rlcr'; nearest: r-0012"):
        registry.run("rlcr")
    with pytest.raises(NotFoundError):
        registry.run("9" * 40)


def test_update_sets_plain_columns_only(registry, tmp_path):
    run, _ = submit(registry)
    fields = {"pid": 7, "phase": "joint", "steps_total": 230, "step": 3}
    fields |= {"mlflow_run_id": "m", "mlflow_experiment_id": "1"}
    registry.update_run(run.id, directory=tmp_path, **fields)
    assert registry.run(run.id) == dataclasses.replace(run, directory=str(tmp_path), **fields)
    with pytest.raises(TypeError, match="cannot set status"):
        registry.update_run(run.id, status="finished")
    with pytest.raises(NotFoundError):
        registry.update_run("r-0002", pid=1)


def test_a_life_with_a_crash_and_a_resume(registry):
    run, _ = submit(registry)
    assert registry.transition(run.id, {"submitted"}, "running")
    first = registry.run(run.id)
    assert (first.attempt, first.ended) == (1, None)
    assert first.started == first.heartbeat >= run.created
    assert not registry.transition(run.id, {"submitted"}, "running", "no")
    assert registry.run(run.id) == first
    for expect, to in (({"running"}, "done"), ("running", "finished")):
        with pytest.raises(ValueError, match="unknown status"):
            registry.transition(run.id, expect, to)
    assert registry.transition(run.id, {"running"}, "failed", "killed")
    failed = registry.run(run.id)
    assert (failed.reason, failed.started) == ("killed", first.started)
    assert failed.ended >= first.started
    assert registry.transition(run.id, {"failed", "lost"}, "running")
    resumed = registry.run(run.id)
    assert (resumed.attempt, resumed.started, resumed.ended) == (2, first.started, None)
    assert resumed.reason is None
    assert registry.transition(run.id, {"running"}, "finished")
    history = registry.history(run.id)
    assert [(c.before, c.after, c.reason, c.attempt) for c in history] == [
        (None, "submitted", None, 0),
        ("submitted", "running", None, 1),
        ("running", "failed", "killed", 1),
        ("failed", "running", None, 2),
        ("running", "finished", None, 2),
    ]
    assert [c.at for c in history] == sorted(c.at for c in history)


def test_a_run_that_somebody_else_has_moved_is_not_as_it_was_seen(registry):
    run, _ = submit(registry)
    assert registry.transition(run.id, {"submitted"}, "submitted", seen=run)
    assert not registry.transition(run.id, {"submitted"}, "submitted", seen=run)
    moved = registry.run(run.id)
    registry.leave_request(run.id, "stop")
    assert not registry.transition(run.id, {"submitted"}, "queued", seen=moved)
    assert registry.run(run.id).request == "stop"
    assert registry.transition(run.id, {"submitted"}, "queued", seen=registry.run(run.id))


def test_a_spec_that_is_not_json_is_refused(registry):
    with pytest.raises(RegistryDatabaseError, match=r"rejected the record: .*not JSON compliant"):
        submit(registry, spec={"max_grad_norm": float("inf")})
    assert registry.runs() == []


def test_a_queued_run_waits_as_long_as_it_must(registry):
    run, created = submit(registry, queue=True)
    assert (run.status, created) == ("queued", True)
    silence(registry, 1, 10**6)
    assert registry.run(run.id).effective_status == "queued"
    assert [r.id for r in registry.runs(statuses=["queued"])] == [run.id]
    assert registry.runs(statuses=["lost"]) == []
    assert submit(registry) == (registry.run(run.id), False)
    assert not registry.heartbeat(run.id)
    assert registry.transition(run.id, {"queued"}, "submitted", "its turn")
    begun = registry.run(run.id)
    assert (begun.effective_status, begun.attempt, begun.reason) == ("submitted", 0, "its turn")
    assert not registry.transition(run.id, {"queued"}, "submitted")
    assert [c.after for c in registry.history(run.id)] == ["queued", "submitted"]


def test_going_back_to_the_queue_forgets_the_supervisor(registry):
    run, _ = submit(registry)
    registry.update_run(run.id, host="one", pid=7)
    registry.start(run.id, ["submitted"])
    assert (registry.run(run.id).host, registry.run(run.id).pid) == ("one", 7)
    registry.transition(run.id, ["running"], "failed")
    registry.transition(run.id, ["failed"], "queued")
    waiting = registry.run(run.id)
    assert (waiting.host, waiting.pid, waiting.ended) == (None, None, None)


def test_a_supervisor_can_be_asked(registry):
    run, _ = submit(registry, queue=True)
    assert not registry.leave_request(run.id, "stop")  # nobody hears it
    registry.transition(run.id, {"queued"}, "submitted")
    assert registry.leave_request(run.id, "stop")
    registry.start(run.id, ["submitted"])
    assert registry.run(run.id).request == "stop"
    assert registry.leave_request(run.id, "kill")
    assert registry.leave_request(run.id, "stop")
    assert registry.run(run.id).request == "kill"
    with pytest.raises(ValueError, match="unknown request 'pause'; known: stop, kill"):
        registry.leave_request(run.id, "pause")
    registry.transition(run.id, ["running"], "stopped")
    assert not registry.leave_request(run.id, "kill")
    registry.transition(run.id, ["stopped"], "submitted")
    assert registry.run(run.id).request is None


def test_a_run_belongs_to_any_number_of_groups(registry):
    for seed in range(3):
        submit(registry, seed=seed)
    assert registry.groups() == {}
    for run_id, group in (("3", "a"), ("1", "a"), ("1", "b"), ("3", "a")):
        registry.join(run_id, group)
    assert registry.groups() == {"a": ["r-0003", "r-0001"], "b": ["r-0001"]}
    assert registry.queries.groups(["1", "2"]) == {"1": ["a", "b"], "2": []}
    with pytest.raises(NotFoundError):
        registry.join("9", "a")
