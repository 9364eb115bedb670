"""Registries that the dashboard is asked about."""

import pytest
from browsing import Tabs, Visit, browser, served
from designs import made
from pages import dashboard
from patience import find_free_port
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


@pytest.fixture
def unused_port():
    """Of this machine."""
    return find_free_port()


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
