"""Whoever reads the registry reads either database: the verbs and the dashboard."""

import json

import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient
from postgres import PASSWORD
from submissions import submit

from rlx.cli.verb_group import rlx_command
from rlx_registry import Registry
from rlx_web import Access, create_app


@pytest.fixture
def run(url, tmp_path):
    with Registry.open(url) as registry:
        run = submit(registry, name="rlcr", yaml="name: rlcr\n")
        registry.start(run.id, ["submitted"])
        registry.update_run(run.id, directory=tmp_path, step=3, steps_total=3)
        for step in range(1, 4):
            registry.results.add_metrics(run.id, step, {"train/loss": 1.0 / step})
        registry.transition(run.id, ["running"], "finished")
        return registry.run(run.id)


def said_by(*arguments):
    result = CliRunner().invoke(rlx_command, arguments)
    assert result.exit_code == 0, result.output
    assert PASSWORD not in result.output
    return result.output


def test_the_verbs(url, run):
    (listed,) = json.loads(said_by("runs", "--json", "--registry", url))
    assert (listed["run"], listed["status"], listed["step"]) == (run.id, "finished", 3)
    shown = json.loads(said_by("status", run.id, "--json", "--registry", url))
    assert (shown["run"], shown["attempt"]) == (run.id, 1)
    assert f"rlcr {run.id}, seed 0" in said_by("status", run.id, "--registry", url)


def test_the_doctor(url, run, monkeypatch):
    monkeypatch.setenv("RLX_REGISTRY", url)
    said = said_by("check", "--json")
    (found,) = (f for f in json.loads(said)["findings"] if f["name"] == "registry")
    assert (found["state"], found["found"].endswith(", 1 run")) == ("ok", True)


def test_the_dashboard(url, run):
    with TestClient(create_app(url, Access(token=None)), base_url="http://127.0.0.1") as client:
        for page in ("/", f"/runs/{run.id}"):
            got = client.get(page)
            assert (got.status_code, PASSWORD in got.text) == (200, False)
            assert run.id in got.text
        assert client.get("/runs/r-0099").status_code == 404


def test_the_dashboard_names_a_server_that_is_down():
    gone = f"postgresql+psycopg://rlx:{PASSWORD}@127.0.0.1:1/db"
    with TestClient(create_app(gone, Access(token=None)), base_url="http://127.0.0.1") as client:
        got = client.get("/")
    assert (got.status_code, PASSWORD in got.text) == (503, False)
