"""One writer per run: an attempt that was taken over writes nothing more."""

import pytest

from rlx_registry import FencedError, NotFoundError

FILE = {"path": "a/b", "bytes": 1, "sha256": "x"}
WRITES = {
    "add_metrics": lambda r: r.results.add_metrics("1", 1, {"loss": 0.5}),
    "set_mirror_cursor": lambda r: r.results.set_mirror_cursor("1", "mlflow", 1),
    "add_event": lambda r: r.results.add_event("1", "k", "m"),
    "add_evaluation": lambda r: r.results.add_evaluation("1", 1, "step", "test", 1, {}),
    "add_checkpoint": lambda r: r.results.add_checkpoint("1", 1, **FILE),
    "add_artifact": lambda r: r.results.add_artifact("1", "a", "k"),
    "add_rollouts": lambda r: r.results.add_rollouts("1", 1, **FILE, statistics={}, index=[]),
    "join": lambda r: r.join("1", "g"),
    "update_run": lambda r: r.update_run("1", step=1),
    "transition": lambda r: r.transition("1", ["running"], "finished"),
    "start": lambda r: r.start("1", ["running"]),
    "leave_request": lambda r: r.leave_request("1", "stop"),
    "heartbeat": lambda r: r.heartbeat("1"),
}


def everything(registry):
    results = registry.results
    told = (results.metrics, results.events, results.evaluations, results.checkpoints)
    told += (results.artifacts, results.rollout_steps, registry.history, registry.run)
    said = [each("1") for each in told]
    return [*said, registry.queries.groups(["1"]), results.mirror_cursor("1", "mlflow")]


@pytest.mark.parametrize("name", WRITES)
def test_a_writer_that_was_taken_over_writes_nothing(registry, name):
    first = registry.start("1", ["submitted"]).attempt
    old = registry.as_writer("1", first)
    old.results.add_metrics("1", 0, {"loss": 1.0})
    second = registry.start("1", ["running"], "taken over").attempt
    assert (first, second) == (1, 2)
    before = everything(registry)
    with pytest.raises(
        FencedError, match="r-0001 is at attempt 2 now: attempt 1 has been taken over"
    ):
        WRITES[name](old)
    assert everything(registry) == before
    WRITES[name](registry.as_writer("1", second))
    assert everything(registry) != before


def test_a_writer_writes_its_own_run_alone(registry):
    writer = registry.as_writer("1", registry.start("1", ["submitted"]).attempt)
    with pytest.raises(ValueError, match="may write only r-0001, not r-0002"):
        writer.results.add_metrics("2", 1, {"loss": 1.0})
    assert registry.results.metrics("2") == {}
    registry.results.add_metrics("2", 1, {"loss": 1.0})  # the registry itself is not bound
    with pytest.raises(NotFoundError):
        registry.as_writer("9", 1)
    assert registry.start("1", ["submitted"]) is None


def test_what_is_written_at_once_is_all_there_or_not_at_all(registry):
    registry.start("1", ["submitted"])
    before = everything(registry)
    writer = registry.as_writer("1", 1)
    with pytest.raises(KeyError), writer.write_atomically():
        for name in ("add_rollouts", "add_metrics", "update_run"):
            WRITES[name](writer)
        raise KeyError
    assert everything(registry) == before
    with writer.write_atomically():
        WRITES["add_rollouts"](writer)
        WRITES["update_run"](writer)
        assert everything(registry) == before, "nobody sees a part"
    assert registry.results.rollout_steps("1") == [1]
    assert registry.run("1").step == 1
    WRITES["add_metrics"](writer)  # alone again
    registry.start("1", ["running"])
    with pytest.raises(FencedError), writer.write_atomically():
        WRITES["update_run"](writer)
