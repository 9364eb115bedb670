"""What the dashboard asks for, real supervisors and workers do."""

import re

from pages import dashboard


def click(client, run_id, action):
    """Sends the form of a run's page."""
    page = client.get(f"/runs/{run_id}").text
    secret = re.search(rf'action="/runs/{run_id}/{action}">.*?value="([^"]+)"', page)[1]
    response = client.post(f"/runs/{run_id}/{action}", data={"write": secret})
    assert response.status_code == 303, response.text


def test_a_run_is_stopped_and_goes_on_through_its_page(own_home):
    home = own_home
    sets = {**home.small, **home.held, "phases.0.steps": 3, "phases.1.steps": 60}
    run_id = home.submit("-d", sets=sets)
    client = dashboard(f"sqlite:///{home.path}/registry.db")
    home.until(lambda: home.run(run_id).step >= 1, "it to train")
    home.hold()  # lest it be done before it is asked
    assert client.twin("/")["groups"][0]["statuses"] == {"running": 1}
    (rank,) = home.ranks(run_id)
    home.freeze(rank)
    home.release()
    click(client, run_id, "stop")
    home.thaw(rank)
    home.until(lambda: home.run(run_id).status == "stopped", "its supervisor to obey")
    left = home.run(run_id)
    assert "request" in left.reason and left.step < 63
    with home.registry() as registry:
        assert registry.results.checkpoints(run_id)[-1].step == left.step, "with a checkpoint"

    home.until(lambda: not home.processes(), "every process to end")
