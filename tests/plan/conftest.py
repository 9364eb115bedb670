"""Plans, each made once: starting the scoring processes takes most of the time."""

from functools import lru_cache
from pathlib import Path

import pytest

from rlx.discovery import check_file
from rlx.plan.report import make_plan

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@lru_cache
def planned(name, *overrides):
    """The plan of an experiment, with `path=value` over it."""
    path = EXPERIMENTS / f"{name}.yaml"
    return make_plan(path, *check_file(path, overrides))


@pytest.fixture
def plan():
    return planned


@pytest.fixture
def guests(tmp_path, monkeypatch):
    """Rewards of another distribution, each wrong in a way of its own."""
    info = tmp_path / "rlx_plan_guest-0.1.dist-info"
    info.mkdir()
    (tmp_path / "rlx_plan_guest.py").write_text(GUESTS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlx-plan-guest\nVersion: 0.1\n")
    names = ("gives_nan", "raises", "hangs", "abstains")
    points = "".join(f"{name} = rlx_plan_guest:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[rlx.rewards]\n{points}")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


GUESTS = '''
import time
from rlx.plugin import reward

@reward
def gives_nan(sample):
    """No number, for one sort of text."""
    return float("nan") if "</answer>" in sample.response else 0.0

@reward
def raises(sample):
    """Never works."""
    raise ValueError("out of order")

@reward
def hangs(sample):
    """Never ends."""
    time.sleep(60)

@reward
def abstains(sample):
    """Never says anything."""
    return None
'''
