"""Any number of open pages cost a run nothing, and the machine little: over real processes."""

from dashboards import dashboard
from pollers import polling, writing

from rlx_registry import Registry

ALONE, POLLED = 2.0, 6.0
"""Seconds."""
NOISE = 1.0
"""Seconds for which a machine with other work may hold any process up."""
SHARE = 0.10
"""Of one core, for the server."""


def test_a_run_at_full_speed_never_waits_for_twenty_pages_that_poll(tmp_path):
    url = f"sqlite:///{tmp_path}/registry.db"
    with writing(url, tmp_path / "run") as writer, dashboard(url) as served:
        for _ in range(2):  # what a server does once in its life does not count
            alone = writer.write(ALONE)
            before = served.cpu()
            with polling(served, writer.run) as pollers:
                polled = writer.write(POLLED)
            share = (served.cpu() - before) / POLLED
            if share <= SHARE and max(polled.seconds) <= max(alone.seconds) + NOISE:
                break
        assert polled.steps
        assert pollers.wrong == []
        assert len(pollers.seconds) >= 2 * 20
        assert pollers.points
        assert alone.said == polled.said == ""  # where a lock refuses a write it says so
        assert max(polled.seconds) <= max(alone.seconds) + NOISE
        assert share <= SHARE
    with Registry.open(url, read_only=True) as registry:
        levels = {event.level for event in registry.results.events(writer.run)}
        (curve,) = registry.results.metrics(writer.run, ["train/m7"]).values()
        assert len(registry.results.rollout_steps(writer.run)) == len(curve)
    assert levels == {"info"}
