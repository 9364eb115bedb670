"""Fixtures: registries in SQLite, or with `--database postgresql` on a server."""

import pytest
from postgres import server

from rlx_registry import Registry


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


@pytest.fixture
def blank(request, tmp_path):
    """The URL of a database that holds nothing yet."""
    if request.config.option.database == "sqlite":
        return f"sqlite:///{tmp_path}/home/registry.db"
    server = request.getfixturevalue("postgres")
    return server.url(server.create())


@pytest.fixture
def url(request, tmp_path):
    """The URL of a database that is a registry already, or becomes one at once."""
    if request.config.option.database == "sqlite":
        return f"sqlite:///{tmp_path}/home/registry.db"
    server = request.getfixturevalue("postgres")
    return server.url(server.create(request.getfixturevalue("template")))
