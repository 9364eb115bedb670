"""Homes in which tests of this folder run experiments, in this process."""

import pytest
from homes import Home


@pytest.fixture(scope="module")
def own_home(tmp_path_factory):
    """A home that no other module's runs are in."""
    return Home(tmp_path_factory.mktemp("own"))
