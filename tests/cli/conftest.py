"""What tests of the command line share."""

import pytest

from rlx_registry import Registry


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with a home of its own, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RLX_REGISTRY", raising=False)
    return tmp_path


@pytest.fixture
def url(folder):
    """Of the registry of that home, which is not there yet."""
    return f"sqlite:///{folder}/home/registry.db"


@pytest.fixture
def registry(url):
    """That registry, open for writing."""
    with Registry.open(url) as opened:
        yield opened
