"""The experiments that docs/gyms.md reports are experiments that rlx takes."""

from pathlib import Path

import pytest

from gyms_installed import need_library
from rlx.checks import check_file

need_library("reasoning_gym")
need_library("textarena")

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments" / "gyms").glob("*.yaml"))


def test_there_are_some():
    assert EXPERIMENTS


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_validates(path):
    check_file(path)
