"""What a reader does on the pages: columns, notes, a log that grows."""

import json
from pathlib import Path

import pytest
from browsing import served
from shown import submit

from rlx_registry import Registry

RATES = (1e-5, 3e-5, 1e-4)


@pytest.fixture
def sweep(registry):
    """Three experiments of one name that differ in a rate, and one of another name."""
    for n, rate in enumerate(RATES):
        spec = {
            "name": "s",
            "learner": {"lr": rate, "clip": None},
            "phases": [{"steps": 5 + n // 2}],
        }
        run, _ = registry.submit(
            digest=str(n) * 64, seed=0, name="s", spec=spec, yaml="", plugins=[], code={},
            environment={},
        )  # fmt: skip
        registry.results.add_metrics(run.id, 5, {"train/loss": 1.0 + n})
        registry.transition(run.id, ["submitted"], "running")
        registry.transition(run.id, ["running"], "finished")
    submit(registry, name="other", digest="f")


@pytest.fixture
def run(registry, tmp_path):
    """A finished run with a folder."""
    folder = tmp_path / "runs" / "r-0001"
    (folder / "pictures").mkdir(parents=True)
    found = submit(registry)
    registry.update_run(found, directory=folder)
    return found


@pytest.fixture
def folder(run, registry):
    return Path(registry.run(run).directory)


@pytest.fixture
def going(run, registry):
    registry.transition(run, ["finished"], "running")
    return run


def progress(folder, **fields):
    (folder / "progress.json").write_text(
        json.dumps({"stage": "warm start", "total": 400, "note": "", "doing": ""} | fields)
    )


def titles(page):
    return page.locator("table.runs thead th").all_inner_texts()[3:]


def test_a_reader_arranges_columns_and_finds_them_again(visit, url, sweep):
    with served(url) as address:
        page = visit(address)
        page.goto("/")
        page.get_by_text("Columns", exact=True).click()
        page.get_by_label("Brier", exact=True).uncheck()
        page.get_by_label("ECE", exact=True).uncheck()
        for _ in range(6):
            page.get_by_role("button", name="learner.lr: earlier").press("Enter")
        page.get_by_label("also").fill("metric:train/loss")
        with page.expect_navigation():
            page.locator("#columns").get_by_role("button", name="Show").click()
        chosen = titles(page)
        assert chosen.index("learner.lr") < chosen.index("Step")
        assert chosen[-1] == "train/loss" and "Brier" not in chosen
        page.goto("/")
        page.wait_for_url("**column=*")
        assert titles(page) == chosen, "the next visit"
        page.get_by_text("Columns", exact=True).click()
        page.get_by_role("link", name="the usual columns").click()
        page.wait_for_url("**usual=1")
        assert "Brier" in titles(page)
        page.goto("/")
        assert "Brier" in titles(page)


def test_a_reader_writes_a_note(visit, url, registry):
    run = submit(registry)
    with served(url) as address:
        page = visit(address)
        page.goto(f"/runs/{run}")
        page.get_by_text("Add a note or tags").click()
        page.get_by_label("note", exact=True).fill("two\nlines <script>alert(1)</script>")
        page.get_by_label("tags").fill("paper")
        with page.expect_navigation():
            page.get_by_role("button", name="Save").click()
        assert page.locator(".note .text").inner_text() == "two\nlines <script>alert(1)</script>"
        page.get_by_role("link", name="paper", exact=True).click()
        page.wait_for_url("**q=tag*")
        assert page.locator("[data-run]").count() == 1
    with Registry.open(url, read_only=True) as opened:
        assert opened.notes.read(run).tags == ("paper",)


def waited(page):
    with page.expect_response("**/live.json*"):
        page.clock.fast_forward(5100)


def test_a_reader_follows_a_warm_start_and_sees_time_go_on(visit, url, registry, going, folder):
    progress(folder, done=1, note="loss 2.500")
    registry.update_run(going, steps_total=10)
    with served(url) as address:
        page = visit(address)
        page.clock.install()
        page.goto(f"/runs/{going}")
        stage = page.locator("[data-field=stage]")
        assert stage.inner_text() == "warm start 1/400 loss 2.500"
        started = page.locator("dd[data-at]").first
        before = started.inner_text()
        page.clock.run_for(3000)
        assert int(started.inner_text().split()[0]) >= int(before.split()[0]) + 2
        progress(folder, done=300, note="\u202e<b>")
        waited(page)
        page.get_by_text("warm start 300/400 ⟨U+202E⟩<b>").wait_for()
        assert page.locator("progress.stage").evaluate("e => [e.value, e.max]") == [300, 400]


def test_a_reader_follows_a_log_and_downloads_it(visit, url, registry, going, folder):
    log = folder / "run.log"
    log.write_text("one\n")
    with served(url) as address:
        page = visit(address)
        page.clock.install()
        page.goto(f"/runs/{going}/log")
        assert page.locator("#lines").inner_text() == "one\n"
        log.write_text("one\ntwo \x1b[2J<script>\n")
        with page.expect_response("**/log.json*"):
            page.clock.fast_forward(5100)
        page.get_by_text("two ␛[2J<script>").wait_for()
        with page.expect_download() as download:
            page.get_by_role("link", name="download").click()
        assert Path(download.value.path()).read_text() == log.read_text()
        assert download.value.suggested_filename == "run.log"
