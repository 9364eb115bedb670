"""Registries of both kinds: a test that takes `url` runs once on each."""

import pytest
from postgres import server

from rlx_registry import Registry

KINDS = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgres():
    with server() as running:
        yield running


@pytest.fixture(scope="session")
def template(postgres):
    """The name of a database with an empty registry, to be copied."""
    name = postgres.create()
    Registry.open(postgres.url(name)).close()
    return name


@pytest.fixture(params=KINDS)
def blank(request, tmp_path):
    """The URL of a database that holds nothing yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/home/registry.db"
    server = request.getfixturevalue("postgres")
    return server.url(server.create())


@pytest.fixture(params=KINDS)
def url(request, tmp_path):
    """The URL of a database that is a registry already, or becomes one at once."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/home/registry.db"
    server = request.getfixturevalue("postgres")
    return server.url(server.create(request.getfixturevalue("template")))
