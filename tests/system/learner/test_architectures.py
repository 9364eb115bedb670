"""Causal language models of transformers: how each is sampled from and trained."""

import pytest
from architecture_table import PAGE, build_page


@pytest.mark.filterwarnings("ignore")  # of modeling code
def test_the_docs_have_the_table():
    assert PAGE.read_text() == build_page(), "run `make docs`"
