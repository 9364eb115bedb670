"""The log and the files of a run: what is read, what is downloaded, and what never is."""

import json
import os
from pathlib import Path

import pytest
from shown import submit

from rlx_web.pages.files import LOG_BYTES

SECRET = "not for readers"


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


def put(registry, run, folder, path, content=b"data"):
    (folder / path).write_bytes(content)
    registry.results.add_artifact(run, path, "picture")


def test_artifacts_are_listed_and_downloaded_as_they_are(empty, registry, run, folder):
    odd = "pictures/a b;\"é\u202e'.svg"
    put(registry, run, folder, odd, b"<svg onload='alert(1)'/>")
    put(registry, run, folder, "spec.json", b"{}" * 300_000)
    registry.results.add_artifact(run, "gone.json", "file")
    page = empty.page(f"/runs/{run}")
    links = [link for link in page.values("href") if "/files/" in link]
    assert len(links) == 2 and "not in the run's folder" in page.text
    for link, path in zip(links, (odd, "spec.json"), strict=True):
        answer = empty.get(link)
        assert answer.content == (folder / path).read_bytes()
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in answer.headers["content-security-policy"]


ELSEWHERE = (
    "../secret", "..%2Fsecret", "%2e%2e/secret", "pictures/../../secret", "/etc/passwd",
    "%2Fetc%2Fpasswd", "spec.json", "journal.jsonl", "pictures", "", "run.log%00", "a//b",
)  # fmt: skip


def test_nothing_else_of_the_machine_is_served(empty, registry, run, folder):
    (folder / "spec.json").write_text(SECRET)  # is there, and not recorded
    (folder / "journal.jsonl").write_text(SECRET)
    (folder.parent / "secret").write_text(SECRET)
    registry.results.add_artifact(run, "pictures", "folder")
    for path in ELSEWHERE:
        answer = empty.get(f"/runs/{run}/files/{path}")
        assert answer.status_code == 404 and SECRET not in answer.text, path


def test_no_link_and_no_pipe_is_followed(empty, registry, run, folder):
    (folder.parent / "secret").write_text(SECRET)
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text(SECRET)
    (folder / "file.json").symlink_to("../secret")
    (folder / "dir").symlink_to(outside)
    os.mkfifo(folder / "pipe")
    (folder / "run.log").symlink_to("../secret")
    for path in ("file.json", "dir/file", "pipe"):
        registry.results.add_artifact(run, path, "file")
    for path in ("file.json", "dir/file", "pipe", "run.log"):
        answer = empty.get(f"/runs/{run}/files/{path}")
        assert answer.status_code == 404 and SECRET not in answer.text, path
    assert empty.twin(f"/runs/{run}/log")["lines"] == []
    assert SECRET not in empty.get(f"/runs/{run}").text
    assert not [link for link in empty.page(f"/runs/{run}").values("href") if "/files/" in link]


def test_a_log_is_shown_from_its_end_and_downloaded_whole(empty, registry, run, folder):
    lines = [f"line {n} \x1b[31m\u202e é" for n in range(12_000)]
    (folder / "run.log").write_text("\n".join(lines) + "\n")
    data = empty.twin(f"/runs/{run}/log")
    assert 0 < data["end"] - data["start"] <= LOG_BYTES
    assert data["lines"] == lines[-len(data["lines"]) :] != lines
    page = empty.page(f"/runs/{run}/log")
    assert "line 11999 ␛[31m⟨U+202E⟩ é" in page.text and "line 0 " not in page.text
    assert "line 11999" in empty.page(f"/runs/{run}").text, "its end is on the page of the run"
    assert empty.get(f"/runs/{run}/files/run.log").text == "\n".join(lines) + "\n"


@pytest.fixture
def going(run, registry):
    registry.transition(run, ["finished"], "running")
    return run


def test_what_a_run_writes_follows_line_by_line(empty, going, folder):
    log = folder / "run.log"
    log.write_text("one\ntw")
    first = empty.twin(f"/runs/{going}/log")
    assert (first["lines"], first["end"]) == (["one"], 4)
    with log.open("a") as file:
        file.write("o\nthree\nfo")
    second = empty.twin(f"/runs/{going}/log?after={first['end']}")
    assert (second["lines"], second["end"]) == (["two", "three"], 14)
    assert empty.twin(f"/runs/{going}/log?after=14")["lines"] == []
    assert empty.twin(f"/runs/{going}/log?after=999")["lines"] == []


def progress(folder, **fields):
    (folder / "progress.json").write_text(
        json.dumps({"stage": "warm start", "total": 400, "note": "", "doing": ""} | fields)
    )


def test_the_progress_of_a_warm_start_is_on_the_page(empty, registry, going, folder):
    assert empty.twin(f"/runs/{going}")["progress"] is None
    progress(folder, done=100, note="loss 1.250")
    assert "warm start 100/400 loss 1.250" in empty.page(f"/runs/{going}").cells()
    for broken in ("", "{", "[]", '{"stage": 1}', '{"stage": "a", "done": "x"}', "null"):
        (folder / "progress.json").write_text(broken)
        assert empty.twin(f"/runs/{going}")["progress"] is None, broken
    progress(folder, done=400)
    registry.transition(going, ["running"], "failed")
    assert empty.twin(f"/runs/{going}")["progress"] is None, "it does nothing any more"
