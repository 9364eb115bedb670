"""Any number of open pages cost a run nothing, and the machine little: over real processes."""

from dashboards import dashboard
from pollers import polling, writing

from rlx_registry import Registry

EVERY = 2.0
"""Seconds between two looks of one page."""
ALONE, POLLED = 0.5, 3.0
"""Seconds that the run writes; `tests/benchmarks/dashboard_polling.py` says what polling costs."""


def test_a_run_at_full_speed_never_waits_for_twenty_pages_that_poll(tmp_path):
    url = f"sqlite:///{tmp_path}/registry.db"
    with writing(url, tmp_path / "run") as writer, dashboard(url) as served:
        alone = writer.write(ALONE)
        with polling(served, writer.run, every=EVERY) as pollers:
            polled = writer.write(POLLED)
        assert polled.steps
        assert pollers.wrong == []
        assert pollers.seconds
        assert pollers.points
        assert alone.said == polled.said == ""  # where a lock refuses a write it says so
    with Registry.open(url, read_only=True) as registry:
        levels = {event.level for event in registry.results.events(writer.run)}
        (curve,) = registry.results.metrics(writer.run, ["train/m7"]).values()
        assert len(registry.results.rollout_steps(writer.run)) == len(curve)
    assert levels == {"info"}
