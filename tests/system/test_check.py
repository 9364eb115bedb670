"""`rlx check`: sound records hold, and whatever was changed afterwards is found by name."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from speech import END, Characters

from rlx.assignment import join_row_rewards
from rlx.batch import build_token_batch, list_batch_rows
from rlx.cli import main
from rlx.launch.submission import submit_run
from rlx.phase_setup import build_setup
from rlx.plan import check_file
from rlx.record.rollouts import read_step, rollout_table
from rlx.reward import RewardPool, score_rollouts
from rlx.rollout import Completion, sample_rollout_trees
from rlx.run.streams import build_trained_rows
from rlx.step import assign_credit
from rlx.train_batch import CreditRules, TokenStreams
from rlx_registry import Registry, read_body, write_body

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


class Sayings:
    """A session that says what its seeds choose among a few things; at first one thing only."""

    answers = (
        "<think>1</think>\n<answer>1 + 2</answer>",
        "<think>so</think><answer>3 * 4",
        "<answer>5 - 2</answer>",
        "nothing",
    )
    confidences = ("<confidence>0.9</confidence>", "<confidence>0.2</confidence>", "who knows")

    def generate(self, requests, sampling):
        says = self.confidences if "confidence" in sampling.spans else self.answers
        return [
            tuple(self.say(says if number else says[-1:], seed) for seed in request.seeds)
            for number, request in enumerate(requests)
        ]

    def say(self, says, seed):
        rng = random.Random(seed)
        ids = (*map(ord, rng.choice(says)), END)
        logprobs = torch.tensor([-rng.random() for _ in ids]).tolist()
        return Completion(ids, tuple(logprobs), "stop")


@pytest.fixture(autouse=True)
def home_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RLX_REGISTRY", raising=False)
    return tmp_path / "home"


@pytest.fixture
def registry(home_of_its_own):
    home_of_its_own.mkdir()
    with Registry.open(f"sqlite:///{home_of_its_own}/registry.db") as opened:
        yield opened


@pytest.fixture(scope="module")
def pool():
    """Scores whatever is recorded here."""
    with RewardPool(workers=1, memory_mb=512) as pool:
        yield pool


@pytest.fixture
def plain(registry, pool):
    """A registry and a run of one step."""
    return registry, recorded(registry, pool, "countdown.yaml", SMALL)


# Records made here --------------------------------------------------------------------------------


def recorded(registry, pool, experiment, sets):
    """A run whose phases have one step each, all of it real but models and sampler."""
    overrides = [f"{path}={json.dumps(value)}" for path, value in sets.items()]
    read, plugins = check_file(EXPERIMENTS / experiment, overrides)
    run, _ = submit_run(registry, read, plugins, again=True)
    for step, phase in enumerate(read.spec.phases, start=1):
        parts = build_setup(read.spec.resolve_phase_spec(phase))
        table, statistics = one_step(parts, step, pool)
        add(registry, run, step, table, {"phase": phase.name, **statistics})
    return run


def add(registry, run, step, table, statistics):
    path = Path(run.directory) / "rollouts" / f"step_{step:06d}.parquet"
    sha256, size = write_body(path, table)
    registry.results.add_rollouts(
        run.id, step, path=path, sha256=sha256, bytes=size, statistics=statistics, index=[]
    )


def one_step(parts, step, pool):
    count = parts.spec.rollout.prompts_per_step
    problems = [parts.task.problem("train", i, step) for i in range(2 * count)]
    seeds = [100 * step + i for i in range(2 * count)]
    trees = sample_rollout_trees(parts.plan, problems, seeds, Sayings(), Characters())
    table = score_rollouts(trees, parts.rewards, pool)
    filtered = {(row.tree, row.segment) for row in list_batch_rows(trees) if row.tree >= count}
    batch = build_token_batch(trees, temperatures=parts.temperatures, without=filtered)
    rng = torch.Generator().manual_seed(step)
    shape = batch.token_ids.shape
    drawn = {
        "reference_logprobs": -torch.rand(shape, generator=rng),
        "values": torch.randn(shape, generator=rng),
        "greedy_scores": torch.rand(shape[:1], generator=rng),
    }
    streams = TokenStreams(
        old_logprobs=batch.behaviour_logprobs,
        optional={name: drawn[name] for name in drawn if name in parts.needs},
        beta=0.05,
        state={"mean_square": 0.25},
    )
    train = assign_credit(
        join_row_rewards(batch, trees, table, parts.mask(batch), label=parts.label),
        streams,
        CreditRules(
            estimator=parts.estimator,
            credit=parts.spec.credit,
            loss=parts.spec.loss,
            max_tokens=parts.max_tokens,
            confidences=parts.rules.confidences,
        ),
    )
    statistics = {"beta": 0.05, "state_before": dict(streams.state), "max_tokens": parts.max_tokens}
    roles = ["trained"] * count + ["filtered"] * count
    return rollout_table(trees, table, build_trained_rows(train), roles), statistics


SMALL = {"rollout.prompts_per_step": 3}
WHOLE = {
    "rewards.global": {
        "right": {"plugin": "countdown.verify", "weight": 0.5},
        "coupled": {"plugin": "countdown", "weight": -0.25, "requires": "score"},
    }
}


def checked(run, *arguments, capsys):
    capsys.readouterr()
    code = main(["check", run.id, "--json", *arguments])
    said = json.loads(capsys.readouterr().out)
    return code, {i["name"]: i for i in said["identities"]}, said


def test_a_record_of_two_turns_holds(registry, pool, capsys):
    """Under every second level."""
    levels = ["none", "prompt_scale", "prompt_renorm", "ema_scale"]
    phases = [
        {"name": level, "steps": 1, "set": {"estimator.second_level": level}} for level in levels
    ]
    run = recorded(registry, pool, "rlcr.yaml", {**SMALL, "phases": phases})
    for step in range(1, len(levels) + 1):
        code, found, _ = checked(run, "--step", f"{step}", capsys=capsys)
        assert [i["first"] for i in found.values() if not i["holds"]] == []
        assert code == 0


# Records that were changed ------------------------------------------------------------------------


def changed(registry, run, step, change):
    """Rewrites a body, with a digest that fits."""
    body = registry.results.rollout_body(run.id, step)
    stored = read_step(read_body(Path(run.directory) / body.path, body.sha256))
    rewards, trained = change(stored)
    table = rollout_table(stored.trees, rewards, trained, stored.roles)
    add(registry, run, step, table, body.statistics)


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


@pytest.fixture(scope="session")
def copied(finished, tmp_path_factory):
    """Makes a home with a copy of the finished run and its registry."""

    def copy():
        home = tmp_path_factory.mktemp("copy")
        shutil.copytree(finished.home.path, home, dirs_exist_ok=True)
        with Registry.open(f"sqlite:///{home}/registry.db") as registry:
            registry.update_run(finished.id, directory=home / "runs" / finished.id)
        return home

    return copy


@pytest.fixture
def copy(copied, monkeypatch):
    home = copied()
    monkeypatch.setenv("RLX_HOME", str(home))
    with Registry.open(f"sqlite:///{home}/registry.db") as registry:
        yield registry


def test_a_run_that_finished_holds(copy, finished, capsys):
    run = copy.run(finished.id)
    code, found, said = checked(run, capsys=capsys)
    assert [i["first"] for i in found.values() if not i["holds"]] == []
    assert (code, said["steps"], said["notes"]) == (0, [1, 2, 3, 4], [])
    assert found["bodies"]["checked"] == 4
    assert found["kl"]["checked"] == 0, "there is no reference"
    assert {name for name, i in found.items() if not i["checked"]} == {"kl"}
    assert main(["check", run.id]) == 0
    shown = capsys.readouterr().out
    assert "all identities hold" in shown
    assert re.search(r"– +kl +nothing to check", shown)


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_found_and_named(name, copy, finished, capsys):
    change, place = CHANGES[name]
    run = copy.run(finished.id)
    changed(copy, run, 3, change)
    code, found, said = checked(run, "--step", "3", capsys=capsys)
    assert (code, said["holds"], said["steps"]) == (1, False, [3])
    first = found[name]["first"][0]
    assert {"step": 3, **place}.items() <= first.items()
    assert first["stored"] != first["expected"]
    if name in ("advantages", "token_rewards"):
        assert first["token"] is not None and found[name]["violated"] == 1
    assert main(["check", run.id, "--step", "3"]) == 1
    shown = capsys.readouterr().out
    assert re.search(rf"✗ +{name} ", shown) and "step 3, tree" in shown


def test_a_changed_score_of_a_whole_rollout_is_found(registry, pool, capsys):
    run = recorded(registry, pool, "countdown.yaml", {**SMALL, **WHOLE})

    def change(stored):
        (place, entries), *_ = stored.rewards.rollouts.items()
        wrong = {**entries, "right": replace(entries["right"], raw=0.25)}
        rollouts = {**stored.rewards.rollouts, place: wrong}
        return replace(stored.rewards, rollouts=rollouts), stored.rows

    changed(registry, run, 1, change)
    code, found, _ = checked(run, capsys=capsys)
    (first,) = found["scores"]["first"]
    assert (code, first["what"], first["stored"]) == (1, "reward right", 0.25)
    assert (first["tree"], first["row"], first["turn"]) == (0, 0, 1)


# What cannot be checked ---------------------------------------------------------------------------


def test_a_body_that_is_not_the_one_recorded_is_said(plain, capsys):
    registry, run = plain
    body = registry.results.rollout_body(run.id, 1)
    (Path(run.directory) / body.path).write_bytes(b"nothing")
    probe = {"path": "probes/step_000001.parquet", "sha256": "0"}
    registry.results.add_evaluation(run.id, 1, "after", "probe/filler", 3, {}, {"body": probe})
    code, found, _ = checked(run, capsys=capsys)
    step, probe = found["bodies"]["first"]
    assert code == 1 and "was recorded as" in step["stored"]
    assert "probes/step_000001" in probe["what"]


def test_plugins_that_have_changed_or_gone_are_said(plain, capsys):
    registry, run = plain
    with registry.open_writer() as connection:
        plugins = json.dumps([{**p, "version": "0.0"} for p in run.plugins])
        spec = json.dumps(run.spec).replace('"countdown.verify"', '"countdown.gone"')
        connection.exec_driver_sql("UPDATE rlx_run SET plugins = ?, spec = ?", (plugins, spec))
    code, found, said = checked(run, capsys=capsys)
    assert (code, said["holds"]) == (3, True)
    assert said["unchecked"] == [
        "scores of '_accuracy' were not checked: no reward plugin named 'countdown.gone'"
    ]
    assert any("the run used rlx 0.0" in note for note in said["notes"])
    assert found["scores"]["checked"] == 6 * 8


def test_a_run_without_rollouts_is_wrong_usage(registry, capsys):
    read, plugins = check_file(EXPERIMENTS / "countdown.yaml")
    submit_run(registry, read, plugins, again=True)
    assert main(["check", "latest"]) == 2
    assert "has recorded no rollouts" in capsys.readouterr().err
