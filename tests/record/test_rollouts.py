"""A step's body comes back from disk bit for bit, and its index agrees with it."""

import json
import math
import struct
from dataclasses import replace

import pyarrow as pa
import pytest
import token_trees
import torch
from submissions import submit
from token_trees import prompt

from rlx.batch import build_token_batch
from rlx.errors import RegistryError
from rlx.plugin import Problem
from rlx.record import rollouts
from rlx.record.recorder import Recorder
from rlx.record.rollouts import (
    SCHEMA,
    SCORE_COLUMNS,
    TOKEN_COLUMNS,
    TrainedRows,
    read_step,
    rollout_index,
    rollout_table,
)
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import NO_PARENT, RolloutTree, Segment
from rlx_registry import Registry, read_body, read_trees, write_body


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def turn(parent, *ids, text="x", seed=7, **named):
    made = token_trees.turn(parent, *ids, **named)
    logprobs = tuple(float32(-1 / (i + 3)) for i in ids)
    return replace(made, logprobs=logprobs, text=text, seed=seed, info={"note": [1, None]})


def grown(text="é漢😀\x00<script>\ufffd"):
    two_turn = RolloutTree(
        Problem(id="p0", prompt="1, 2 → 3?", fields={"numbers": [1, 2]}, stratum="2"),
        (
            prompt(NO_PARENT, 1, 2),
            turn(0, 3, 4, 151_000, text=text, answer=((0, 3), (1, 2)), hull=(0, 3), seed=2**63 - 1),
            turn(0, 5, reason="length"),
            prompt(1, 9),
            turn(3, 6, 7, kind="confidence", number=2, text="y" * 500),
        ),
    )
    environment = RolloutTree(
        Problem(id="p1", prompt="?", fields={}),
        (
            prompt(NO_PARENT, 1),
            turn(0, 2, kind="query"),
            Segment(parent=1, author="environment", token_ids=(3, 4)),
            turn(2, 5, 6, number=2),
        ),
    )
    return [two_turn, environment]


def scored():
    return RewardTable(
        {
            (0, 1): {
                "accuracy": RewardEntry("accuracy", 0.1, 2.0, "scored", None, {"a": 0.3}),
                "_length": RewardEntry("_length", 3.0, 1.0, "scored"),
            },
            (0, 2): {"accuracy": RewardEntry("accuracy", None, 2.0, "absent", "timed out")},
            (0, 4): {},
            (1, 1): {},
            (1, 3): {"accuracy": RewardEntry("accuracy", 1 / 3, 2.0, "scored")},
        },
        frozenset({(0, 2)}),
        {"accuracy": 1, "short": 1},
        {
            (0, 1): {"short": RewardEntry("short", 0.5, 2.0, "scored")},
            (0, 2): {"short": RewardEntry("short", -1.0, 2.0, "replaced", "hung")},
            (1, 3): {"short": RewardEntry("short", None, 2.0, "absent")},
        },
    )


def trained(trees, without=()):
    """Rows with every column that there is, but one that the step has not; in every bit of
    float32."""
    batch = build_token_batch(trees, without=without)
    rng = torch.Generator().manual_seed(1)
    shape = batch.token_ids.shape
    noise = {
        name: (5 * torch.randn(shape, generator=rng)).to(dtype)
        for name, dtype in TOKEN_COLUMNS.items()
    }
    noise["weights"][0, 2:5] = torch.tensor([-0.0, math.inf, 1e-45])
    mask = batch.is_own & (torch.rand(shape, generator=rng) < 0.7)
    scores = {name: torch.randn(len(batch.rows), generator=rng) for name in SCORE_COLUMNS}
    return batch, rows_of_step(batch, {**noise, "mask": mask, "values": None}, scores)


def rows_of_step(batch, tokens, scores=None):
    places = [(r.tree, r.segment, r.parent, r.kind, r.level) for r in batch.rows]
    return TrainedRows(places, batch.group_ids, batch.is_own, tokens, scores or {})


def spell(ids):
    return [f"<{i}>" if i != 9 else "\ud800" for i in ids]


def bits(values):
    return torch.tensor(values, dtype=torch.float32).view(torch.int32).tolist()


def test_a_column_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="no column is called entropy"):
        rows_of_step(build_token_batch(grown()), {"entropy": None})


@pytest.mark.parametrize("without", [(), {(0, 2)}, {(1, 3)}])
def test_a_step_is_read_back_as_it_was(tmp_path, without):
    trees, table, roles = grown(), scored(), ("trained", "greedy")
    batch, rows = trained(trees, without)
    write_body(tmp_path / "b", body := rollout_table(trees, table, rows, roles))
    assert body.schema == SCHEMA
    stored = read_step(read_body(tmp_path / "b"))
    assert (stored.trees, stored.roles) == (tuple(trees), roles)
    assert stored.rewards == table
    assert stored.rows.places == rows.places
    assert stored.rows.groups.tolist() == batch.group_ids.tolist()
    assert stored.rows.tokens["values"] is None
    for name, original in rows.tokens.items():
        if original is not None:
            again = stored.rows.tokens[name]
            assert again.shape == batch.token_ids.shape
            assert bits(again.tolist()) == bits(original.where(stored.rows.own, 0).tolist())
    assert (batch.is_own & ~stored.rows.own).sum() == 0
    for name, original in rows.scores.items():
        assert bits(stored.rows.scores[name].tolist()) == bits(original.tolist())
    assert rollout_table(stored.trees, stored.rewards, stored.rows, stored.roles) == body


def test_the_texts_of_tokens_are_kept_beside_what_sums_need():
    trees = grown()
    _, rows = trained(trees)
    table = rollout_table(trees, scored(), rows, pieces=spell)
    for tree, said in zip(trees, table["pieces"].to_pylist(), strict=True):
        for segment, texts in zip(tree.segments, said, strict=True):
            assert texts == ["\ufffd" if i == 9 else f"<{i}>" for i in segment.token_ids]
    assert read_step(table).trees == tuple(trees)


def test_parts_of_a_large_step_do_not_show_in_its_file(tmp_path, monkeypatch):
    trees = [*grown(), *grown(), grown()[0]]
    _, rows = trained(trees)

    def write(name):
        table = rollouts.rollout_table(trees, scored(), rows, pieces=spell)
        return write_body(tmp_path / name, table)

    whole = write("whole")
    monkeypatch.setattr(rollouts, "AT_ONCE", 2)
    assert write("parts") == whole
    assert read_step(read_body(tmp_path / "parts")).trees == tuple(trees)


def test_tokens_that_learn_are_kept_whoever_wrote_them():
    trees = grown()
    batch = build_token_batch(trees)
    rows = rows_of_step(batch, {"mask": batch.is_token})
    stored = read_step(rollout_table(trees, scored(), rows))
    assert stored.rows.tokens["mask"].equal(batch.is_token)


def test_what_another_version_kept_is_refused_in_words():
    trees = grown()
    _, rows = trained(trees)
    older = rollout_table(trees, scored(), rows).drop_columns(["role"])
    with pytest.raises(RegistryError, match="recorded by another version of rlx"):
        read_step(older)


def test_a_stream_that_an_earlier_version_did_not_know_is_read_as_missing():
    trees = grown()
    _, rows = trained(trees)
    now = rollout_table(trees, scored(), rows)
    lists = now["rows"].combine_chunks()
    fields = [field for field in lists.type.value_type if field.name != "mc_values"]
    flat = lists.flatten()
    fewer = pa.StructArray.from_arrays([flat.field(f.name) for f in fields], fields=fields)
    older = pa.ListArray.from_arrays(lists.offsets, fewer)
    at = now.column_names.index("rows")
    stored = read_step(now.set_column(at, "rows", older))
    assert stored.rows.tokens["mc_values"] is None
    assert stored.rows.tokens["advantages"].equal(read_step(now).rows.tokens["advantages"])


def test_a_score_is_read_under_the_name_that_earlier_versions_gave_it(tmp_path):
    trees = grown()
    _, rows = trained(trees)
    body = rollout_table(trees, scored(), rows)
    texts = json.dumps(body["rows"].to_pylist()).replace("masked_return_sum", "seed_returns_score")
    old = pa.array(json.loads(texts))
    write_body(tmp_path / "new", body)
    write_body(tmp_path / "old", body.set_column(body.column_names.index("rows"), "rows", old))
    former, now = (read_trees(tmp_path / name, None, range(len(trees))) for name in ("old", "new"))
    assert former == now


def test_the_index_says_what_lists_and_filters_need():
    trees = grown()
    batch, rows = trained(trees)
    index = rollout_index(trees, scored(), rows)
    assert [i.row for i in index] == list(range(len(batch.rows))) == [0, 1, 2, 3]
    assert [(i.tree, i.group, i.turn, i.problem_id) for i in index] == [
        (0, 0, "answer", "p0"),
        (0, 0, "answer", "p0"),
        (0, 1, "confidence", "p0"),
        (1, 2, "answer", "p1"),
    ]
    assert [i.parent_row for i in index] == [None, None, 0, None]
    assert [i.reward for i in index] == pytest.approx([0.2 + 1, -2.0, None, 2 / 3])
    assert index[0].rewards == {"accuracy": 0.1, "_length": 3.0, "short": 0.5}
    assert index[3].rewards == {"accuracy": 1 / 3, "short": None}
    assert [i.failed for i in index] == [None, "accuracy: timed out; short: hung", None, None]
    assert [i.finish_reason for i in index] == ["stop", "length", "stop", "stop"]
    assert index[2].preview == "y" * 160
    for i in index:
        learned = rows.tokens["advantages"][i.row][rows.tokens["mask"][i.row]]
        assert i.advantage == pytest.approx(learned.mean().item() if len(learned) else 0.0)


@pytest.fixture
def registry(tmp_path):
    """Has a run, 1."""
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as opened:
        submit(opened)
        opened.update_run("1", directory=tmp_path)
        yield opened


def record(recorder, folder, *steps):
    trees = grown()
    _, rows = trained(trees)
    for step in steps:
        path = folder / "rollouts" / f"{step}.parquet"
        recorder.step(step, {"x": step}, trees, scored(), rows, {}, path, pieces=spell)


def test_every_nth_step_is_stored_and_the_last(registry, tmp_path):
    recorder = Recorder(registry, "r-0001", keep_bodies=True, every=3, last=6)
    record(recorder, tmp_path, *range(1, 7))
    recorder.finish_step()
    assert registry.results.rollout_steps("1") == [1, 4, 6]
    assert registry.results.metrics("1")["x"] == [(n, n) for n in range(1, 7)]
    assert registry.run("1").step == 6
    assert {p.stem for p in (tmp_path / "rollouts").iterdir()} == {"1", "4", "6"}


def test_a_step_that_cannot_be_written_is_raised_by_the_next_call(registry, tmp_path):
    recorder = Recorder(registry, "r-0001", keep_bodies=True)
    (tmp_path / "rollouts").write_text("a file where a folder should be")
    record(recorder, tmp_path, 1)
    with pytest.raises(OSError, match="rollouts"):
        recorder.event("note", "later")
    assert registry.results.events("1") == [] and registry.run("1").step == 0
    recorder.event("note", "it has been said once")
    assert len(registry.results.events("1")) == 1
