"""The release command, in clones of the checkout."""

import subprocess
import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]


release = SimpleNamespace(**run_path(str(ROOT / ".ci" / "release.py")))


def git(folder, *arguments):
    done = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def clone_checkout(folder):
    git(folder, "clone", "--quiet", "--shared", "--no-tags", str(ROOT), "checkout")
    checkout = folder / "checkout"
    git(checkout, "config", "user.name", "A Maintainer")
    git(checkout, "config", "user.email", "maintainer@example.org")
    changelog = checkout / "CHANGELOG.md"
    text = changelog.read_text().partition("\n## ")[2].partition("\n")[2]
    changelog.write_text(f"# Changelog\n\n## Unreleased\n{text}")
    git(checkout, "commit", "--all", "--allow-empty", "--message", "Changes")
    return checkout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return clone_checkout(tmp_path_factory.mktemp("release"))


def run_release(monkeypatch, checkout, *arguments):
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(sys, "argv", ["release.py", *arguments])
    release.main()


def test_a_dry_run_makes_packages_and_changes_nothing(checkout, monkeypatch, capsys):
    before = git(checkout, "rev-parse", "HEAD")
    run_release(monkeypatch, checkout, "99.1.0")
    said = capsys.readouterr().out
    assert git(checkout, "rev-parse", "HEAD") == before
    assert git(checkout, "status", "--porcelain") == git(checkout, "tag") == ""
    packages = sorted((checkout / "dist").iterdir())
    assert [file.name for file in packages] == ["rlx-99.1.0-py3-none-any.whl", "rlx-99.1.0.tar.gz"]
    for file in packages:
        assert f"{release.digest(file)}  dist/{file.name}" in said
    assert "rlx 99.1.0 from an empty folder: quick.yaml: ok" in said
    assert "dry run: nothing changed" in said


def test_a_release_is_a_commit_and_a_tag(tmp_path):
    checkout, clone = clone_checkout(tmp_path), tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(checkout), str(clone))
    release.commit_release(checkout, clone, Version("99.1.0"))
    release.take_over(checkout, clone)
    assert git(checkout, "describe", "--exact-match") == "v99.1.0"
    assert git(checkout, "log", "-1", "--format=%an %s") == "A Maintainer Version 99.1.0"
    assert git(checkout, "status", "--porcelain") == ""
    assert 'version = "99.1.0"\n' in (checkout / "pyproject.toml").read_text()
    assert '__version__ = "99.1.0"\n' in (checkout / "platform/rlx/__init__.py").read_text()
    assert "\n## 99.1.0 (20" in (checkout / "CHANGELOG.md").read_text()
    with pytest.raises(SystemExit, match=r"99\.0\.0 is not newer than 99\.1\.0, which has the tag"):
        release.check_checkout(checkout, Version("99.0.0"))
    with pytest.raises(SystemExit, match=r"expected '## Unreleased' .* found '## 99\.1\.0 \(20"):
        release.date_changelog((checkout / "CHANGELOG.md").read_text(), Version("99.2.0"), "today")
    (checkout / "notes.txt").write_text("")
    with pytest.raises(SystemExit, match=r"not committed:\n\?\? notes\.txt"):
        release.check_checkout(checkout, Version("99.2.0"))
