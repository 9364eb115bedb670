"""The dashboard, over real registries, through its HTTP surface."""

import json
import re
import shutil
import subprocess
import sys
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

import rlx_web
from rlx_registry import Registry, RolloutIndex
from rlx_web import create_app
from rlx_web.pages import decimate
from rlx_web.text import HIDDEN, visible

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}\x1b[31m\u202etxt\x00"
PAGES = ["/", "/runs/r-0001", "/runs/r-0001/rollouts/3"]


class Page(HTMLParser):
    """Elements, attributes and text of a page, as a browser would take them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.data = [], [], []
        self.feed(html)
        self.text = "".join(self.data)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data):
        self.data.append(data)

    def values(self, name):
        return [value for _, attribute, value in self.attributes if attribute == name]


def row(number, parent=None, **changes):
    fields = {
        "row": number,
        "parent_row": parent,
        "tree": 0,
        "group": 0,
        "turn": "answer" if parent is None else "confidence",
        "problem_id": "problem-7",
        "reward": 1.1,
        "rewards": {"accuracy": 1.0},
        "advantage": 0.5,
        "n_tokens": 12,
        "finish_reason": "stop",
        "preview": f"text of row {number}",
    }
    return RolloutIndex(**(fields | changes))


def fill(registry, text="plain"):
    """One run in which every piece of free text is `text`."""
    run, _ = registry.submit(
        digest="d" * 64, seed=7, name=text, spec={"note": text}, yaml=f"name: {text}\n",
        plugins=[], code={}, environment={},
    )  # fmt: skip
    registry.transition(run.id, ["submitted"], "running", text)
    registry.update_run(run.id, step=3, steps_total=230, phase=text)
    for step in range(4):
        values = {"train/reward": step / 4, f"rewards/{text[:30]}/mean": 0.25, "loose": 2.0}
        registry.add_metrics(run.id, step, values)
    registry.add_evaluation(run.id, 0, "before", text, 600, {"accuracy": 0.25, "ece": {"lo": 0.1}})
    registry.add_evaluation(run.id, 3, "after", text, 600, {"accuracy": 0.625, text: None})
    registry.add_event(run.id, text, text, {"payload": text}, level="warning")
    index = [
        row(0, problem_id=text, preview=text, rewards={text: 1.0}, failed=text, finish_reason=text),
        row(1, parent=0, turn=text, advantage=-0.25),
        row(2, parent=0),
        row(3, reward=None, failed="timeout"),
        row(4, tree=1),
        row(5, parent=99, tree=1),
    ]
    place = {"path": "rollouts/3.parquet", "sha256": "x", "bytes": 1, "statistics": {"mean": text}}
    registry.add_rollouts(run.id, 3, **place, index=index)
    registry.add_rollouts(run.id, 2, **place, index=[])


def client(url):
    return TestClient(create_app(url), base_url="http://127.0.0.1:8711")


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/registry.db"


@pytest.fixture
def plain(url):
    with Registry.open(url) as registry:
        fill(registry)
    return client(url)


@pytest.fixture
def hostile(url):
    with Registry.open(url) as registry:
        fill(registry, HOSTILE)
    return client(url)


@pytest.mark.parametrize("path", PAGES)
def test_hostile_text_stays_text(hostile, path):
    response = hostile.get(path)
    assert response.status_code == 200
    page = Page(response.text)
    assert "img" not in page.tags
    assert [v for v in page.values("src") if not v.startswith("/static/")] == []
    assert page.tags.count("script") == len(page.values("src"))
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name == "style"]
    assert "<script>alert(1)</script>" in page.text
    assert "{{ 7*7 }}" in page.text
    assert "␛[31m⟨U+202E⟩txt␀" in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", page.text)


@pytest.mark.parametrize("path", PAGES)
def test_the_twin_of_a_hostile_page_is_inert_json_with_the_text_as_it_was(hostile, path):
    twin = hostile.get(f"{path}.json")
    assert twin.headers["content-type"].startswith("application/json")
    assert HOSTILE in leaves(twin.json())


def leaves(value):
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


@pytest.mark.parametrize(
    "path", [*PAGES, "/.json", "/static/charts.js", "/runs/r-0009", "/none", "/runs/r-0009.json"]
)
def test_every_answer_carries_the_strict_policy(plain, path):
    headers = plain.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", PAGES)
def test_pages_need_nothing_from_elsewhere_and_nothing_inline(plain, path):
    page = Page(plain.get(path).text)
    links = [*page.values("src"), *page.values("href")]
    assert links
    assert all(not re.match(r"\w+:|//", link) for link in links)
    for link in links:
        if link.startswith("/"):
            assert plain.get(link).status_code == 200, link


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_other_host_names_are_refused(plain, host):
    assert plain.get("/", headers={"host": host}).status_code == 400


@pytest.mark.parametrize("host", ["localhost", "localhost:8711", "127.0.0.1", "[::1]:8711"])
def test_loopback_names_are_served(plain, host):
    assert plain.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_nothing_but_get(plain, method):
    for path in PAGES:
        assert plain.request(method, path).status_code == 405


def test_what_is_not_there_is_a_404_in_the_form_that_was_asked_for(plain):
    for path in ("/runs/r-0042", "/runs/x", "/runs/r-0001/rollouts/9", "/nothing"):
        response = plain.get(path)
        assert (response.status_code, response.headers["content-type"][:9]) == (404, "text/html")
    assert "no run &#39;r-0042&#39;; nearest: r-0001" in plain.get("/runs/r-0042").text
    twin = plain.get("/runs/r-0042.json")
    assert twin.status_code == 404
    assert twin.json()["error"]["message"] == "no run 'r-0042'; nearest: r-0001"
    assert plain.get("/runs/r-0001/rollouts/99999999999999999999").status_code == 404
    assert plain.get("/runs/r-0001/rollouts/3x").status_code == 404


def test_a_registry_that_is_not_there_yet_is_a_503_until_it_is(url):
    dashboard = client(url)
    assert dashboard.get("/").status_code == 503
    assert "there is no registry at" in dashboard.get("/.json").json()["error"]["message"]
    Registry.open(url).close()
    page = dashboard.get("/")
    assert page.status_code == 200
    assert "No runs yet" in page.text


def test_the_runs_page_shows_what_its_twin_says(plain):
    (run,) = plain.get("/.json").json()["runs"]
    assert (run["id"], run["status"], run["step"], run["steps_total"]) == (
        "r-0001",
        "running",
        3,
        230,
    )
    assert run["headline"] == {
        "name": "train/reward",
        "value": 0.75,
        "points": [[0, 0.0], [1, 0.25], [2, 0.5], [3, 0.75]],
    }
    text = Page(plain.get("/").text).text
    for shown in ("r-0001", "plain", "7", "running", "3/230", "0.75", "train/reward", "0 s ago"):
        assert shown in text


def test_the_run_page_shows_what_its_twin_says(plain):
    data = plain.get("/runs/latest.json").json()
    page = Page(plain.get("/runs/latest").text)
    groups = {part["group"]: [m["name"] for m in part["metrics"]] for part in data["charts"]}
    assert groups == {
        "": ["loose"],
        "rewards/plain": ["rewards/plain/mean"],
        "train": ["train/reward"],
    }
    assert page.values("data-metric") == [name for names in groups.values() for name in names]
    (table,) = data["evaluations"]
    assert [(c["label"], c["step"], c["n"]) for c in table["columns"]] == [
        ("before", 0, 600),
        ("after", 3, 600),
    ]
    assert table["rows"] == [
        {"name": "accuracy", "values": [0.25, 0.625], "change": 0.375},
        {"name": "ece.lo", "values": [0.1, None], "change": None},
        {"name": "plain", "values": [None, None], "change": None},
    ]
    assert "+0.375" in page.text
    assert data["spec"] == {"note": "plain"}
    assert '"note": "plain"' in page.text
    assert [e["level"] for e in data["events"]] == ["warning"]
    assert [c["after"] for c in data["history"]] == ["submitted", "running"]
    assert "/runs/r-0001/rollouts/2" in page.values("href")


def test_bins_are_drawn_and_the_figures_that_matter_come_first(url):
    empty = {"low": 0.0, "high": 0.5, "n": 0, "confidence": None, "accuracy": None}
    full = {"low": 0.5, "high": 1.0, "n": 9, "confidence": 0.8, "accuracy": 0.75}
    bins = [empty, full | {"accuracy_low": 0.5, "accuracy_high": 0.9}]
    with Registry.open(url) as registry:
        fill(registry)
        figures = {"odd": 1.5, "brier": 0.2, "accuracy": 0.75, "bins": bins, "ece": 0.1}
        registry.add_evaluation("1", 3, "after", "held_out", 9, figures)
    dashboard = client(url)
    table = dashboard.get("/runs/1.json").json()["evaluations"][0]
    assert [row["name"] for row in table["rows"]] == ["accuracy", "brier", "ece", "odd"]
    assert table["bins"] == [{"label": "after", "step": 3, "bins": bins}]
    html = dashboard.get("/runs/1").text
    page = Page(html)
    assert page.values("class").count("reliability") == 1
    assert page.values("class").count("share") == 1
    assert "9 answers, 0.8 stated, 0.75 right" in page.text
    assert html.index("Brier score") < html.index("Every figure") < html.index(">odd<")


def test_the_runs_page_shows_the_newest_evaluation(plain):
    (run,) = plain.get("/.json").json()["runs"]
    assert run["newest"] == {"label": "after", "accuracy": 0.625, "brier": None, "ece": None}
    assert "0.625" in Page(plain.get("/").text).text


def test_the_rollouts_page_is_the_trees_of_its_twin(plain):
    data = plain.get("/runs/r-0001/rollouts/3.json").json()
    shape = [
        [(r["row"], [c["row"] for c in r["children"]]) for r in t["rows"]] for t in data["trees"]
    ]
    assert shape == [[(0, [1, 2]), (3, [])], [(4, []), (5, [])]]
    assert (data["previous"], data["next"], data["largest_advantage"]) == (2, None, 0.5)
    html = plain.get("/runs/r-0001/rollouts/3").text
    page = Page(html)
    order = [int(number) for number in re.findall(r"text of row (\d)", page.text)]
    assert order == [1, 2, 3, 4, 5]  # row 0 says "plain"
    assert html.index("text of row 1") < html.index("</ul>") < html.index("text of row 3")
    assert "-0.25" in page.text
    assert "timeout" in page.text
    assert "2" in page.values("href")
    assert "trained on no rows" in plain.get("/runs/r-0001/rollouts/2").text


def test_a_lone_surrogate_breaks_neither_page(url):
    with Registry.open(url) as registry:
        fill(registry)
        registry.add_event("1", "k", "m", {"text": "\ud800"})
    dashboard = client(url)
    assert dashboard.get("/runs/1").status_code == 200
    assert dashboard.get("/runs/1.json").json()["events"][-1]["payload"] == {"text": "\ud800"}


@given(st.text())
def test_visible_text_hides_nothing_and_keeps_the_rest(text):
    shown = visible(text)
    hidden = [c for c in shown if unicodedata.category(c) in HIDDEN and c != "\n"]
    assert hidden == []
    assert shown.count("\n") == text.count("\n")
    if text.isprintable():
        assert shown == text


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    st.integers(2, 50),
)
def test_thinning_keeps_order_and_extremes(values, limit):
    points = list(enumerate(values))
    thin = decimate(points, limit)
    assert len(thin) <= max(limit, 2)
    assert thin == sorted(thin)
    assert set(thin) <= set(points)
    kept = [v for _, v in thin]
    assert (min(kept), max(kept)) == (min(values), max(values))


def test_the_dashboard_reads_through_the_registry_alone():
    heavy = "torch transformers mlflow deepspeed rlx alembic pyarrow numpy"
    script = f"import rlx_web, sys; print([m for m in {heavy.split()} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the charts' arithmetic")
def test_chart_arithmetic():
    module = (Path(rlx_web.__file__).parent / "static" / "charts.js").as_uri()
    script = f"""
import {{ ticks, scale, number }} from "{module}";
console.log(JSON.stringify([ticks(0, 1), ticks(-0.03, 0.11), ticks(5, 5), ticks(0, 230),
  scale(0, 2, 10, 20)(1), scale(3, 3, 10, 20)(3), number(0.123456), number(-2e-7), number(0)]));
"""
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [
        [0, 0.25, 0.5, 0.75, 1],
        [0, 0.05, 0.1],
        [5],
        [0, 100, 200],
        15,
        15,
        "0.1235",
        "-2.00e-7",
        "0",
    ]
