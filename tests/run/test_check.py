"""`rlx check`: whatever was changed in a record afterwards is found by name."""

import json
import re
from dataclasses import replace

import pytest
import torch

from rlx.record.rollouts import read_step, rollout_table
from rlx_registry import Registry, read_body, write_body


@pytest.fixture
def copy(finished, tmp_path):
    """The home of the finished run for a test that writes, and its registry, open for writing."""
    home = finished.home.copy(tmp_path)
    with Registry.open(f"sqlite:///{home.path}/registry.db") as registry:
        yield home, registry


def checked(home, run_id, *arguments):
    done = home.rlx("check", run_id, "--json", *arguments)
    said = json.loads(done.stdout)
    return done.returncode, {i["name"]: i for i in said["identities"]}, said


def token(name, row, value):
    """Returns what changes a row's second token that learns; without a row, the first that does
    not."""

    def change(stored):
        mask = stored.rows.tokens["mask"]
        if row is None:
            place = (stored.rows.own & ~mask).nonzero()[0]
        else:
            place = torch.tensor([row, mask[row].nonzero()[1, 0]])
        tensor = stored.rows.tokens[name].clone()
        tensor[*place] = value(tensor[*place])
        tokens = {**stored.rows.tokens, name: tensor}
        return stored.rewards, replace(stored.rows, tokens=tokens)

    return change


def reward(name, tree):
    def change(stored):
        place = next(p for p, es in stored.rewards.turns.items() if p[0] == tree and name in es)
        entry = stored.rewards.turns[place][name]
        entries = {**stored.rewards.turns[place], name: replace(entry, raw=entry.raw + 0.5)}
        turns = {**stored.rewards.turns, place: entries}
        return replace(stored.rewards, turns=turns), stored.rows

    return change


def total(row):
    def change(stored):
        scores = {**stored.rows.scores, "total_score": stored.rows.scores["total_score"].clone()}
        scores["total_score"][row] += 1
        return stored.rewards, replace(stored.rows, scores=scores)

    return change


CHANGES = {
    "scores": (reward("accuracy", 1), {"tree": 1, "turn": 1, "token": None}),
    "masks": (token("mask", 4, lambda _: False), {"row": 4, "stored": False, "expected": True}),
    "advantages": (token("advantages", 5, lambda a: a + 0.01), {"row": 5, "turn": 2}),
    "token_rewards": (token("token_rewards", 2, lambda r: r + 1e-6), {"row": 2, "turn": 1}),
    "placement": (token("placed", 2, lambda r: r + 1e-6), {"row": 2, "turn": 1}),
    "weights": (token("weights", None, lambda _: 1.0), {"stored": 1.0, "expected": 0.0}),
    "totals": (total(3), {"row": 3, "turn": None, "token": None}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_found_and_named(name, copy, finished):
    """With a digest that fits."""
    home, registry = copy
    change, place = CHANGES[name]
    body = registry.results.rollout_body(finished.id, 3)
    path = home.path / "runs" / finished.id / body.path
    stored = read_step(read_body(path, body.sha256))
    path.unlink()  # it is a link
    table = rollout_table(stored.trees, *change(stored), stored.roles)
    sha256, size = write_body(path, table)
    registry.results.add_rollouts(
        finished.id, 3, path=path, sha256=sha256, bytes=size, statistics=body.statistics, index=[]
    )
    code, found, said = checked(home, finished.id, "--step", "3")
    assert (code, said["holds"], said["steps"]) == (1, False, [3])
    first = found[name]["first"][0]
    assert {"step": 3, **place}.items() <= first.items()
    assert first["stored"] != first["expected"]
    if name in ("advantages", "token_rewards"):
        assert first["token"] is not None and found[name]["violated"] == 1
        shown = home.rlx("check", finished.id, "--step", "3").stdout
        assert re.search(rf"✗ +{name} ", shown) and "step 3, tree" in shown


def test_a_body_that_is_not_the_one_recorded_is_said(copy, finished):
    home, registry = copy
    body = registry.results.rollout_body(finished.id, 1)
    path = home.path / "runs" / finished.id / body.path
    path.unlink()
    path.write_bytes(b"nothing")
    probe = {"path": "probes/step_000001.parquet", "sha256": "0"}
    registry.results.add_evaluation(finished.id, 1, "after", "probe/filler", 3, {}, {"body": probe})
    code, found, _ = checked(home, finished.id)
    step, probe = found["bodies"]["first"]
    assert code == 1 and "was recorded as" in step["stored"]
    assert "probes/step_000001" in probe["what"]


def test_plugins_that_have_changed_or_gone_are_said(copy, finished):
    home, registry = copy
    with registry.open_writer() as connection:
        plugins = json.dumps([{**p, "version": "0.0"} for p in finished.record.plugins])
        spec = json.dumps(finished.record.spec).replace('"countdown.arithmetic"', '"gone"')
        connection.exec_driver_sql("UPDATE rlx_run SET plugins = ?, spec = ?", (plugins, spec))
    code, _, said = checked(home, finished.id)
    assert (code, said["holds"]) == (3, True)
    gone = "scores of 'arithmetic' were not checked: no reward plugin named 'gone'"
    assert gone in said["unchecked"]
    assert any("the run used rlx 0.0" in note for note in said["notes"])
