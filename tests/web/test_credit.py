"""Why a rollout got its advantage: the figures of every token are those that were stored."""

import json
import math
import struct
from statistics import fmean, stdev

import pyarrow as pa
import pytest
from pages import dashboard
from shown import shown

from rlx_registry import Registry, read_body, write_body
from rlx_web.pages.credit import CHANNELS

STEP = "/runs/r-0001/rollouts/3"
ROWS = list(range(11))


def stored(folder, step=3):
    """Rows of a step with their trees, as they are in the file."""
    body = read_body(folder / f"runs/r-0001/rollouts/{step}.parquet")
    return {row["row"]: (tree, row) for tree in body.to_pylist() for row in tree["rows"]}


def bits(value):
    return None if value is None else struct.pack("<f", value)


@pytest.mark.parametrize("number", ROWS)
def test_every_figure_of_every_token_is_the_stored_one_bit_for_bit(plain, filled, number):
    rows = stored(filled)
    assert sorted(rows) == ROWS
    tree, row = rows[number]
    lines = plain.twin(f"{STEP}/{number}")["lines"]
    ids, texts, authors, said, segment = [], [], [], [], row["segment"]
    path = []
    while segment >= 0:
        path.insert(0, segment)
        segment = tree["segments"][segment]["parent"]
    for s in path:
        one = tree["segments"][s]
        ids += one["token_ids"]
        texts += tree["pieces"][s]
        authors += [one["author"]] * len(one["token_ids"])
        said += one["behaviour_logprobs"] or [None] * len(one["token_ids"])
    assert [line["token"] for line in lines] == ids
    assert [line["text"] for line in lines] == texts
    assert [line["author"] for line in lines] == authors
    assert [line["position"] for line in lines] == list(range(len(ids)))
    assert [bits(line.get("behaviour")) for line in lines] == [bits(v) for v in said]
    own = range(row["start"], row["start"] + len(row["mask"]))
    for name in set(CHANNELS.values()) - {"behaviour", "drift", "values"}:
        for line in lines:
            kept = row[name][line["position"] - row["start"]] if line["position"] in own else None
            assert bits(line.get(name)) == bits(kept), (name, line["position"])
    for line in lines:
        at = line["position"]
        assert line["learns"] == (at in own and row["mask"][at - row["start"]])
        assert "values" not in line, "the step had none"
        if line["learns"] and "behaviour" in line:
            assert line["drift"] == line["old_logprobs"] - line["behaviour"]
        else:
            assert "drift" not in line


@pytest.mark.parametrize("number", ROWS)
def test_what_its_advantage_starts_from(plain, known, number):
    index = known.results.rollout_index("1", 3)
    data, own = plain.twin(f"{STEP}/{number}"), index[number]
    mates = [i for i in index if i.group == own.group]
    rewards = [m.reward for m in mates if m.reward is not None]
    assert data["row"]["advantage"] == own.advantage
    group = data["group"]
    assert [m["row"] for m in group["rows"]] == [m.row for m in mates]
    assert group["mean"] == pytest.approx(fmean(rewards))
    assert group["sigma"] == (pytest.approx(stdev(rewards)) if len(rewards) > 1 else None)
    if own.reward is None:
        assert group["above"] is None
    else:
        assert group["above"] == pytest.approx(own.reward - fmean(rewards))
    assert group["alike"] == (len(set(rewards)) <= 1)
    text = plain.page(f"{STEP}/{number}").cells()
    assert f"Advantage {own.advantage:+.3g}" in text
    assert f"Mean of its group {fmean(rewards):.4g}" in text
    assert ("rewards of its group are equal" in text) == group["alike"]


def test_rewards_of_its_turns_and_of_the_whole(plain):
    data = plain.twin(f"{STEP}/6")
    assert [(t["turn"], t["kind"]) for t in data["turns"]] == [(1, "query"), (2, "answer")]
    assert [e["name"] for t in data["turns"] for e in t["rewards"]] == ["short"]
    assert [(e["name"], e["part"], e["reason"]) for e in data["global_rewards"]] == [
        ("whole plain", 1.0, "plain")
    ]
    assert [line["author"] for line in data["lines"]].count("environment") == 2
    confidence = plain.twin(f"{STEP}/2")
    assert [t["kind"] for t in confidence["turns"]] == ["kind plain"], "not those of its answer"
    assert confidence["tokens"]["own"] == 7 and confidence["tokens"]["total"] == 9


def test_the_rules_are_those_of_its_phase(plain):
    data = plain.twin(f"{STEP}/0")
    assert data["recipe"]["estimator"] == {"eps": 0.5, "ddof": 1, "name": "grpo", "said": "plain"}
    assert data["recipe"]["mask"] == {"strategy": "turn_spans"}
    assert (data["phase"], data["beta"]) == ("plain", 0.125)
    assert "eps 0.5" in plain.page(f"{STEP}/0").cells()


RANGES = {
    "": (0, 5),
    "0-2": (0, 2),
    "3-4": (3, 4),
    "2-900": (2, 5),
    "4-1": (4, 4),
    "99-100": (5, 5),
}
NO_RANGES = ("x", "1", "1-", "-1", "1-2-3", "1-2 ", "9999999999-9", "\U00011f51-\U00011f52")


def test_a_range_of_tokens_has_an_address(plain):
    found = {}
    for asked in RANGES:
        query = f"?tokens={asked}" if asked else ""
        data, page = plain.twin(f"{STEP}/0{query}"), plain.page(f"{STEP}/0{query}")
        start, stop = found[asked] = data["tokens"]["start"], data["tokens"]["stop"]
        assert [line["position"] for line in data["lines"]] == list(range(start, stop)), asked
        boxes = [v for v in page.values("id") if v[0] == "t" and v[1:].isdigit()]
        assert boxes == [f"t{n}" for n in range(start, stop)], asked
    assert found == RANGES
    refused = {a: plain.get(f"{STEP}/0", params={"tokens": a}).status_code for a in NO_RANGES}
    assert refused == dict.fromkeys(NO_RANGES, 422)


def test_rows_one_after_the_other_within_their_tree(plain):
    around = [(d["previous"], d["next"]) for d in (plain.twin(f"{STEP}/{n}") for n in (0, 3, 5, 6))]
    assert around == [(None, 1), (2, 4), (4, None), (None, None)]


@pytest.fixture
def own(tmp_path):
    """A registry whose bodies a test may rewrite."""
    url = f"sqlite:///{tmp_path}/registry.db"
    with Registry.open(url) as registry:
        shown(registry, tmp_path)
        path = tmp_path / "runs/r-0001/rollouts/3.parquet"
        body = read_body(path)

        def rewrite(change):
            digest, size = write_body(path, change(body))
            kept = registry.results.rollout_body("1", 3)
            index = registry.results.rollout_index("1", 3)
            place = {"path": kept.path, "sha256": digest, "bytes": size}
            registry.results.add_rollouts("1", 3, **place, statistics=kept.statistics, index=index)
            return dashboard(url)

        yield rewrite


def test_a_body_without_the_texts_of_tokens_shows_their_numbers(own):
    client = own(lambda body: body.drop_columns(["pieces"]))
    data = client.twin(f"{STEP}/0")
    assert data["textless"]
    assert [line["text"] for line in data["lines"]] == ["#1", "#4", "#3", "#4", "#5"]
    assert "recorded without the texts of its tokens" in client.page(f"{STEP}/0").text
    assert "first plain" in client.page(STEP).text


def spoiled(body):
    records = body.to_pylist()
    row = records[0]["rows"][0]
    row["old_logprobs"] = [-math.inf, math.nan, -1.0]
    row["advantages"] = [math.nan, math.inf, -math.inf]
    row["kl"] = [math.nan] * 3
    row["scores"]["total_score"] = math.nan
    records[0]["segments"][1]["behaviour_logprobs"] = [-math.inf, -1.0, -1.0]
    return pa.Table.from_pylist(records, schema=body.schema)


def test_a_run_that_went_to_infinity_can_be_looked_at(own):
    """What is not finite has no number in JSON, and is a figure all the same."""
    client = own(spoiled)
    data = client.twin(f"{STEP}/0")
    first, second, third = data["lines"][2:]
    assert (first["advantages"], second["advantages"], third["advantages"]) == (
        "nan",
        "inf",
        "-inf",
    )
    assert (first["old_logprobs"], third["old_logprobs"]) == ("-inf", -1.0)
    names = {c["name"]: c["largest"] for c in data["channels"]}
    assert names["kl"] == 0.0, "nothing finite: it can be chosen, and colours nothing"
    assert math.isfinite(names["advantages"])
    assert json.dumps(data, allow_nan=False)
    text = client.page(f"{STEP}/0").cells()
    assert "-inf" in text and "nan" in text
    assert client.get(STEP).status_code == 200


FOREIGN = {
    "segment 1 has the parent 1": lambda tree: tree["segments"][1].update(parent=1),
    "segment 1 has the parent 3": lambda tree: tree["segments"][1].update(parent=3),
    "segment 0 has the parent -2": lambda tree: tree["segments"][0].update(parent=-2),
    "segment 1 lacks the text of a token": lambda tree: tree["pieces"][1].pop(),
    "texts of 8 segments, not of 9": lambda tree: tree["pieces"].pop(),
    "whose parts are no object": lambda tree: tree["segments"][1]["rewards"][0].update(parts="[]"),
    "Expecting property name": lambda tree: tree["segments"][1]["rewards"][0].update(parts="{"),
    "row 0 names segment 99": lambda tree: tree["rows"][0].update(segment=99),
    "row 0 names segment -1": lambda tree: tree["rows"][0].update(segment=-1),
    "streams of different lengths": lambda tree: tree["rows"][0]["kl"].pop(),
    "row 0 has streams": lambda tree: tree["rows"][0].update(start=-1),
    "NoneType": lambda tree: tree["segments"][1].update(token_ids=None),
}


def test_a_body_from_elsewhere_that_is_no_tree_is_named(own):
    """Its digest is right: whoever wrote the file has also written the record."""
    for why, spoil in FOREIGN.items():

        def change(body, spoil=spoil):
            records = body.to_pylist()
            spoil(records[0])
            return pa.Table.from_pylist(records, schema=body.schema)

        client = own(change)
        assert why in client.twin(STEP)["missing"]
        assert "first plain" in client.page(STEP).text, "its previews are shown"
        refused = client.get(f"{STEP}/0.json")
        assert refused.status_code == 404 and why in refused.json()["error"]["message"]
