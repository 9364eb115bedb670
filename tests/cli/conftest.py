"""What tests of the command line share."""

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with a home of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RLX_REGISTRY", raising=False)
    return tmp_path
