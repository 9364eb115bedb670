"""A placement of another distribution, named in YAML with its own options."""

import json
from pathlib import Path

import pytest
from guests import installed

from rlx.cli import main
from rlx.discovery import build_placement
from rlx.plan import check_file

QUICK = Path(__file__).parents[2] / "experiments" / "quick.yaml"
MODULE = '''
from typing import ClassVar
from pydantic import Field
from rlx.plugin import Placement

class Early(Placement):
    """The rewards of turns on their first tokens."""
    implementation: ClassVar[str] = "page_early_rule:place_early"
    share: float = Field(1.0, ge=0, le=1)
    """Share of a turn's reward that lies there; the rest is on the second token."""
'''
RULE = """
import torch

def place_early(inputs, options):
    placed = inputs.turn_rewards.new_zeros(inputs.mask.shape)
    for tokens, reward in zip(inputs.turn_masks, inputs.turn_rewards.unbind(1)):
        number = tokens.cumsum(1)
        first, second = tokens & (number == 1), tokens & (number == 2)
        alone = tokens.sum(1, keepdim=True) == 1
        share = torch.where(alone, 1.0, options.share)
        placed = placed + torch.where(first, share * reward[:, None], 0.0)
        placed = placed + torch.where(second, (1 - options.share) * reward[:, None], 0.0)
    start = inputs.mask & (inputs.mask.cumsum(1) == 1)
    return placed + torch.where(start, inputs.global_rewards[:, None], 0.0)
"""


@pytest.fixture(autouse=True)
def guest(tmp_path, monkeypatch):
    points = "[rlx.placements]\nearly = page_early:Early\n"
    modules = {"page_early": MODULE, "page_early_rule": RULE}
    with installed(tmp_path, monkeypatch, "rlx-early", points, **modules):
        yield


def test_yaml_names_it_with_its_options():
    overrides = ["credit.placement={plugin: early, share: 0.25}", "estimator.name=gae", "critic={}"]
    read, plugins = check_file(QUICK, overrides)
    assert build_placement(read.spec.credit).share == 0.25
    assert {(one.kind, one.name) for one in plugins.provenance} >= {("placement", "early")}
    assert read.spec.dump_resolved()["credit"]["placement"] == {"plugin": "early", "share": 0.25}
    read, _ = check_file(QUICK, ["credit.placement=early"])
    assert read.spec.dump_resolved()["credit"]["placement"] == "early"


def test_a_plan_places_rewards_by_it(capsys):
    sets = ["credit.placement={plugin: early, share: 0.25}", "estimator.name=reinforce_plus_plus"]
    assert main(["plan", str(QUICK), "--json", *(f"--set={one}" for one in sets)]) == 0
    rows = json.loads(capsys.readouterr().out)["phases"][0]["rows"]
    learning = [[token for token in row["tokens"] if token["learns"]] for row in rows]
    paid = [[at for at, token in enumerate(own) if token["placed"]] for own in learning]
    assert [0, 1] in paid and all(places == [0, 1][: len(places)] for places in paid)
