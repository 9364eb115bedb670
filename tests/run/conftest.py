"""Homes in which tests of this folder run experiments, in this process."""

import pytest
from homes import Home, keep_finished_run


@pytest.fixture(scope="module")
def own_home(tmp_path_factory):
    """A home that no other module's runs are in."""
    return Home(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory, worker_id):
    """A finished run, made once for all workers of a session."""
    folder = tmp_path_factory.getbasetemp()
    return keep_finished_run((folder if worker_id == "master" else folder.parent) / "kept")


@pytest.fixture
def home(finished):
    """The home of that run."""
    return finished.home
