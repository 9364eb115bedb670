"""Dashboards that Chromium asks, over registries made here and over real runs."""

import pytest
from browsing import Tabs, Visit, browser, served
from designs import made
from registries import empty, filled, known, plain, registry, url

__all__ = ["empty", "filled", "known", "plain", "registry", "url"]


@pytest.fixture(scope="session")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def plain_site(filled):
    """The address of the dashboard over the registry that nobody changes."""
    with served(f"sqlite:///{filled}/registry.db") as address:
        yield address


@pytest.fixture(scope="session")
def home(chromium, tmp_path_factory):
    """Where real runs of the three designs are."""
    return made(tmp_path_factory.mktemp("designs"))


@pytest.fixture(scope="session")
def real(home):
    """The address of their dashboard."""
    with served(f"sqlite:///{home}/registry.db") as address:
        yield address


@pytest.fixture(scope="session")
def enter(chromium):
    """Begins visits; those of one address with the same options share what was fetched."""
    kept = {}

    def begin(address, **options):
        found = f"{address} {sorted(options.items())}"
        if chromium.restart_if_ended():
            kept.clear()
        if found not in kept:
            kept[found] = Tabs(chromium, address, **options)
        return Visit(kept[found])

    return begin


@pytest.fixture
def visit(enter):
    """Opens tabs; afterwards none has had an error or asked another server."""
    opened = []

    def begin(address, **options):
        opened.append(enter(address, **options))
        return opened[-1].page

    yield begin
    for one in opened:
        one.close()
