"""What the dashboard stands on, and what it must not lean on."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import dashboard

from rlx_registry import Registry
from rlx_web.text import format_byte_size


def test_the_registry_and_who_holds_what(plain, known, filled):
    data, text = plain.twin("/system"), plain.page("/system").cells()
    assert data["registry"] == known.queries.describe_database()
    assert data["registry"]["kind"] == "sqlite" and data["registry"]["bytes"] > 4096
    assert data["statuses"] == {"finished": 1, "running": 1}
    (lease,) = data["leases"]
    assert (lease["id"], lease["host"], lease["pid"]) == ("r-0002", "plain", 8)
    assert 0 <= lease["silent"] < 600
    (device,) = data["devices"]
    assert (device["host"], device["name"], device["run_id"]) == ("plain", "plain:1", "r-0002")
    for said in (f"{filled}/registry.db", "r-0002 plain running plain 8 1", "plain plain:1 r-0002"):
        assert said in text, said


def test_the_disk(plain, known, filled):
    data = plain.twin("/system")
    (disk,) = data["disks"]
    assert disk["folder"] == str(filled / "runs")
    assert disk["total"] == shutil.disk_usage(filled).total
    assert disk["used"] + disk["free"] <= disk["total"]
    bodies = [p.stat().st_size for p in filled.glob("runs/*/rollouts/*.parquet")]
    assert len(bodies) == 6
    assert data["stored"]["rollouts"] == sum(bodies)
    assert data["stored"]["checkpoints"] == 2 * 4096
    assert {s["run"] for s in data["stored"]["largest"]} == {"r-0001", "r-0002"}
    text = plain.page("/system").cells()
    assert (
        f"Rollouts {format_byte_size(sum(bodies))} , checkpoints recorded 8.0 KiB"
        in text.replace("B,", "B ,")
    )


def test_how_plugins_fared(plain, known):
    data, page = plain.twin("/system"), plain.page("/system")
    assert [(p["name"], p["state"], p["message"]) for p in data["plugins"]] == [
        ("0 plain", "ok", "plain"),
        ("1 plain", "broken", "plain"),
        ("2 plain", "clash", "plain"),
    ]
    assert page.values("class").count("bad") == 2
    assert "reward 1 plain plain plain broken plain plain" in page.cells()


def test_an_empty_registry_says_so(empty):
    data, text = empty.twin("/system"), empty.page("/system").cells()
    assert (data["leases"], data["devices"], data["disks"], data["plugins"]) == ([], [], [], [])
    for said in (
        "Runs none",
        "No run has a supervisor now.",
        "No device is in use.",
        "Not checked yet",
    ):
        assert said in text, said


def test_a_registry_that_is_not_there_yet_is_a_503_until_it_is(url):
    client = dashboard(url)
    for path in ("/", "/system", "/compare?run=1", "/runs/1"):
        assert client.get(path).status_code == 503
        twin = client.get(path.replace("?", ".json?") if "?" in path else f"{path}.json")
        assert twin.status_code == 503
        assert "there is no registry at" in twin.json()["error"]["message"]
    assert client.get("/live.json").status_code == 503
    Registry.open(url).close()
    assert client.get("/").status_code == 200
    Path(url.removeprefix("sqlite:///")).write_bytes(b"no database")
    assert client.get("/").status_code == 503
    assert "not a" in client.get("/.json").json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    ["/runs/r-0042", "/runs/x", "/runs/r-0001/rollouts/9", "/nothing", "/runs/r-0001/rollouts/3x"],
)
def test_what_is_not_there_is_a_404_in_the_form_that_was_asked_for(plain, path):
    page = plain.get(path)
    assert (page.status_code, page.headers["content-type"][:9]) == (404, "text/html")
    twin = plain.get(f"{path}.json")
    assert (twin.status_code, twin.headers["content-type"]) == (404, "application/json")
    assert twin.json()["error"]["status"] == 404


def test_a_refusal_says_why(plain):
    said = "no run 'r-0042'; nearest: r-0002, r-0001"
    assert said in plain.get("/runs/r-0042.json").json()["error"]["message"]
    assert "no run &#39;r-0042&#39;; nearest: r-0002, r-0001" in plain.get("/runs/r-0042").text
    assert plain.get("/runs/plain.json").status_code == 404, "a name that two runs have"


@pytest.mark.parametrize(
    "path",
    [
        "/?page=x",
        "/runs/1/rollouts/3?low=x",
        "/runs/1/rollouts/3?against=\U00011f51",  # a digit of a Unicode newer than Python's
        "/runs/1/rollouts/3/0?tokens=x",
    ],
)
def test_what_makes_no_sense_is_a_422_in_the_form_that_was_asked_for(plain, path):
    page, twin = plain.get(path), plain.get(path.replace("?", ".json?"))
    assert (page.status_code, page.headers["content-type"][:9]) == (422, "text/html")
    assert (twin.status_code, twin.headers["content-type"]) == (422, "application/json")
    name = path.partition("?")[2].partition("=")[0]
    assert name in page.text and name in twin.json()["error"]["message"]


def test_every_link_of_every_page_leads_somewhere(plain):
    seen, waiting = set(), {"/", "/compare?run=1&run=2", "/system"}
    while waiting and len(seen) < 90:
        path = waiting.pop()
        seen.add(path)
        response = plain.get(path)
        assert response.status_code in (200, 303), path
        if response.headers.get("content-type", "").startswith("text/html"):
            for link in plain.page(path).values("href"):
                if link.startswith("?"):
                    link = path.partition("?")[0] + link
                if link.startswith("/"):
                    waiting |= {link} - seen
                else:
                    assert link.startswith(("#", "http://127.0.0.1:5000/#/")), link
    assert len(seen) > 60


def test_the_dashboard_reads_through_the_registry_alone():
    heavy = "torch transformers mlflow deepspeed rlx alembic pyarrow numpy scipy"
    script = f"import rlx_web, sys; print([m for m in {heavy.split()} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
