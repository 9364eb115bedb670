"""Databases for registries."""

import pytest
from databases import blank, postgres, template, url
from submissions import submit

from rlx_registry import Registry

__all__ = ["blank", "postgres", "template", "url"]


@pytest.fixture
def registry(url):
    """Four runs that have been submitted, with seeds from 0."""
    with Registry.open(url) as opened:
        for seed in range(4):
            submit(opened, seed=seed)
        yield opened
