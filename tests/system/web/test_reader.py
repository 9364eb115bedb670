"""What a reader follows on the pages: the stage of a run, a log that grows."""

import json
from pathlib import Path

import pytest
from browsing import served
from shown import submit


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
