"""Fixtures: registries that the dashboard is asked about, and the dashboard in this process."""

import pytest
from pages import dashboard
from shown import shown

from rlx_registry import Registry


@pytest.fixture
def url(tmp_path):
    """Of a registry that is not there yet."""
    return f"sqlite:///{tmp_path}/registry.db"


@pytest.fixture
def registry(url):
    """An empty one, open for writing."""
    with Registry.open(url) as opened:
        yield opened


@pytest.fixture
def empty(url, registry):
    """The dashboard over it."""
    return dashboard(url)


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """The folder of a registry with something of everything, which nobody changes."""
    folder = tmp_path_factory.mktemp("filled")
    with Registry.open(f"sqlite:///{folder}/registry.db") as opened:
        shown(opened, folder)
    return folder


@pytest.fixture(scope="session")
def plain(filled):
    """The dashboard over it."""
    return dashboard(f"sqlite:///{filled}/registry.db")


@pytest.fixture(scope="session")
def known(filled):
    """The registry itself."""
    with Registry.open(f"sqlite:///{filled}/registry.db", read_only=True) as opened:
        yield opened
