"""What `rlx serve` serves of a run: its trained model, or a checkpoint."""

import re

import pytest
from rows import each_row

from rlx.errors import SpecError
from rlx.results import open_served_model

IDS = [1, 12, 43, 16, 44, 15]


@pytest.fixture
def url(home):
    return f"sqlite:///{home.path}/registry.db"


def test_the_model_of_a_run_and_that_of_its_last_checkpoint_are_one(finished, url):
    found = {}
    for name in (finished.id, f"{finished.id}@latest", str(finished.root / "model")):
        with open_served_model(name, ["sampler.max_rows=7"], url, 64) as opened:
            assert opened.max_rows == 7
            assert name in {opened.model.name, *opened.model.aliases}
            found[opened.model.name] = opened.engine.compute_logprobs([IDS], 2)
    own, checkpoint, folder = found.items()
    assert (own[0], checkpoint[0]) == (finished.id, f"{finished.id}@4")
    assert own[1] == checkpoint[1] == folder[1]
    assert not list(finished.root.glob(".rlx-eval-*"))


@each_row(
    ("name", "override", "said"),
    [
        ("r-0009", (), "no run 'r-0009'"),
        ("r-0001@two", (), "write RUN@STEP with a number, or RUN@latest"),
        ("r-0001@3", (), "there is no checkpoint of step 3"),
        ("latest", ("task.numbers=[3]",), "only runner and sampler may be changed"),
        ("latest", ("sampler.engine=transformer",), "did you mean 'transformers'?"),
        ("latest", ("runner.thread=1",), "did you mean 'threads'?"),
    ],
)
def test_what_cannot_be_served_is_said(finished, url, name, override, said):
    opened = open_served_model(name, override, url, 64)
    with pytest.raises(SpecError, match=re.escape(said)), opened:
        pass
