"""`rlx web --mlflow`: MLflow's server and its UI are for those who show the token."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

import psutil
import pytest
from patience import LIMIT, find_free_port, stop_process, wait_until

from rlx.record import MlflowMirror
from rlx_registry import Registry, find_mlflow_charts, find_mlflow_link
from rlx_web.mlflow_app import create_mlflow_app

# MLflow's own, under SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

MAIN = "import sys; from rlx.cli import main; sys.exit(main())"
SEARCH = "/api/2.0/mlflow/experiments/search"


class Running:
    """`rlx web --mlflow` with a token of its own, and its address as it was printed."""

    def __init__(self, folder):
        self.port, self._log = find_free_port(), folder / "log"
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "mlflow.db").touch()
        given = {
            "RLX_HOME": str(folder),
            "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder}/mlflow.db?timeout=20",
        }
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN, "web", "--mlflow", "--port", str(self.port)],
                env={**os.environ, **given}, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until("MLflow to serve", lambda: self._serves())
        self.token = re.search(r"\?token=([^\s#]+)", self.said)[1]

    @property
    def said(self):
        return self._log.read_text()

    def _serves(self):
        assert self.process.poll() is None, self.said
        try:
            return self.ask("/")
        except urllib.error.URLError:
            return None

    def ask(self, path, data=None, **headers):
        """Status, headers and body of an answer; redirects are not followed."""
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.build_opener(Stay).open(request, timeout=120) as response:
                return response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()


class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    started = Running(tmp_path_factory.mktemp("mlflow"))
    yield started
    stop_process(started.process)


@pytest.mark.parametrize("path", ["/", "/health", "/version", f"{SEARCH}?max_results=9", "/static"])
def test_without_the_token_nothing_is_told(running, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "rlx_token_5000=wrong"}):
        status, answer, body = running.ask(path, **headers)
        assert status == 401
        assert answer["WWW-Authenticate"] == "Bearer"
        assert b"rlx web --mlflow, printed its address with the\ntoken" in body
    assert running.ask(f"{path}?token=wrong")[0] == 401


def test_the_printed_address_leaves_a_cookie_that_opens_the_ui(running):
    status, headers, _ = running.ask(f"/?token={running.token}")
    assert (status, headers["Location"]) == (303, "/")
    kept, *flags = headers["Set-Cookie"].lower().split("; ")
    assert {"httponly", "samesite=strict"} <= set(flags)
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert kept.startswith(f"rlx_token_{running.port}=")
    assert b"<html" in running.ask("/", Cookie=cookie)[2].lower()
    sent = {"Cookie": cookie, "Content-Type": "application/json", "Origin": running.url}
    status, _, body = running.ask(SEARCH, json.dumps({"max_results": 9}).encode(), **sent)
    assert status == 200, body
    sent["Origin"] = f"http://127.0.0.1:{running.port + 1}"
    assert running.ask(SEARCH, json.dumps({"max_results": 9}).encode(), **sent)[0] == 403
    assert running.ask("/", Cookie=cookie, Host="evil.example")[0] == 400


def test_runs_are_mirrored_with_the_token_as_mlflow_names_it(running, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", running.token)
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        run, _ = registry.submit(
            digest="d", seed=0, name="rlcr", spec={"seed": 0}, yaml="seed: 0\n", plugins=[],
            code={}, environment={},
        )  # fmt: skip
        registry.update_run(run.id, directory=tmp_path)
        registry.results.add_metrics(run.id, 1, {"train/loss": 0.5})
        assert MlflowMirror(registry, run.id, running.url, None).deliver() == 1


def test_links_open_the_runs_and_not_the_traces(running, chromium, tmp_path):
    from playwright.sync_api import expect

    with (
        Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry,
        chromium.new_page() as page,
    ):
        page.set_default_timeout(1000 * LIMIT)
        runs = []
        for seed in (0, 1):
            run, _ = registry.submit(
                digest="d", seed=seed, name="rlcr",
                spec={"tracking": {"mlflow": running.url, "experiment": "paper"}, "lr": seed},
                yaml="", plugins=[], code={}, environment={},
            )  # fmt: skip
            registry.update_run(run.id, directory=tmp_path)
            registry.results.add_metrics(run.id, 1, {"train/loss": 0.5 + seed})
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MLFLOW_TRACKING_TOKEN", running.token)
                MlflowMirror(registry, run.id, running.url, tmp_path / "files").begin()
            runs.append(registry.run(run.id))
        page.goto(re.search(r"MLflow on (\S+)", running.said)[1])
        page.get_by_role("link", name="paper").wait_for()
        page.goto(f"{running.url}/{find_mlflow_charts(runs[0])}")
        expect(page.get_by_text("2 matching runs")).to_be_visible()
        expect(page.get_by_role("link", name="Model registry")).to_be_visible()
        page.goto(find_mlflow_link(runs).url)
        expect(page.get_by_text("Comparing 2 Runs from 1 Experiment").first).to_be_visible()
        page.goto(find_mlflow_link(runs[:1]).url)
        expect(page.get_by_text("About this run")).to_be_visible()
        assert "Traces 0" not in page.inner_text("body")


def test_no_command_line_and_no_log_has_the_token(running):
    for process in (found := [psutil.Process(running.process.pid), *children(running.process.pid)]):
        line = " ".join(process.cmdline())
        assert running.token not in line
        assert "mlflow.db" not in line
    assert len(found) >= 2
    assert running.ask(f"/?token={running.token}")[0] == 303
    assert running.said.count(running.token) == 1, "where its address is printed"


def children(pid):
    return psutil.Process(pid).children(recursive=True)


def test_the_application_does_not_open_without_its_rule(monkeypatch):
    monkeypatch.delenv("RLX_MLFLOW_ACCESS", raising=False)
    with pytest.raises(RuntimeError, match="start this server by `rlx web --mlflow`"):
        create_mlflow_app()
