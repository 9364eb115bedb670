"""Worked examples: shipped ones, those where rlx differs on purpose, and malformed files."""

import json
from pathlib import Path

import pytest
from golden_records import GoldenRecord, check_golden_record, read_golden_records

from rlx.errors import SpecError

FOLDER = Path(__file__).parent
PEERS = ("gdpo", "kg_r1", "maxrl", "rlcr", "tinyzero", "trl_1_16_0", "verl_0_9_1")


def findings(function, inputs, outputs, **options):
    record = GoldenRecord(function=function, inputs=inputs, outputs=outputs, options=options)
    return {found.output: found for found in check_golden_record(record)}


@pytest.mark.parametrize("name", ["golden", *PEERS])
def test_every_shipped_record_is_ok(name):
    records = read_golden_records(FOLDER / f"{name}.json")
    assert len(records.examples) >= 50
    found = [
        finding
        for record in records.examples
        for finding in check_golden_record(record, rtol=records.rtol, atol=records.atol)
    ]
    assert not [finding for finding in found if finding.status != "ok"]
    assert len(found) >= len(records.examples)


RECORD = {
    "function": "credit.prompt_scale",
    "inputs": {"advantages": [1.0, -1.0], "prompt_ids": [0, 0]},
    "options": {"ddof": 0, "eps": 0.0},
    "outputs": {"value": [1.0, -1.0]},
}


@pytest.mark.parametrize(
    ("value", "status"), [([1.0, -1.0], "ok"), ([1.0, -1.00001], "differs"), ([1.0], "differs")]
)
def test_a_changed_number_is_found(value, status):
    (found,) = check_golden_record(GoldenRecord(**{**RECORD, "outputs": {"value": value}}))
    assert found.status == status


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"function": "credit.group_advantage"}, "did you mean 'credit.group_advantages'?"),
        ({"inputs": {"advantages": [1.0]}}, "missing a required argument: 'prompt_ids'"),
        ({"options": {"eps": 0.0, "epsilon": 0.0}}, "unexpected keyword argument 'epsilon'"),
        ({"options": {"advantages": [1.0]}}, "'advantages' is both an input and an option"),
        ({"outputs": {"advantages": [1.0]}}, "credit.prompt_scale gives value"),
    ],
)
def test_what_rlx_cannot_compute_is_unknown_and_says_why(change, why):
    (found,) = check_golden_record(GoldenRecord(**{**RECORD, **change}))
    assert found.status == "unknown" and why in found.reason


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("no json", "records.json: not JSON"),
        ('{"id": "g03"}', "record 1 is not an object with 'function' and 'outputs'"),
        (json.dumps([RECORD, {**RECORD, "option": {}}]), "record 2: 'option' is none of function"),
        (json.dumps([{**RECORD, "inputs": [1]}]), "record 1: 'inputs' must be an object"),
    ],
)
def test_a_file_of_another_form_is_refused_in_a_sentence(content, why, tmp_path):
    (tmp_path / "records.json").write_text(content)
    with pytest.raises(SpecError, match=why.replace("(", r"\(")):
        read_golden_records(tmp_path / "records.json")


def test_null_is_not_compared_and_everything_else_is():
    given = {"per_row": [2.0], "mask": [[1, 0]]}
    for expected, status in (
        ([[2.0, None]], "ok"),
        ([[2.0, 0.0]], "ok"),
        ([[2.0, 1.0]], "differs"),
        ([[2.0]], "differs"),
        ([2.0, 0.0], "differs"),
        (2.0, "differs"),
    ):
        found = findings("credit.spread_over_mask", given, {"value": expected})["value"]
        assert found.status == status, expected


def test_an_output_beside_known_ones_is_not_passed_over():
    rewards = {"token_rewards": [[1.0]], "values": [[0.5]], "mask": [[1]]}
    found = findings(
        "credit.compute_gae_advantages", rewards, {"advantages": [[0.5]], "novelty": 1}
    )
    assert [f.status for f in found.values()] == ["ok", "unknown"]
    assert found["novelty"].reason.endswith("gives advantages, returns")


# Peers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PEERS)
def test_where_rlx_differs_on_purpose_it_differs(name):
    content = json.loads((FOLDER / f"{name}.json").read_text())
    assert "examples" in content and "differences" in content
    for entry in content["differences"]:
        found = list(check_golden_record(GoldenRecord(**entry)))
        assert found and all(each.status == "differs" for each in found), entry
        assert entry["title"], entry


def test_countdown_cases_have_the_scores_of_both_rules():
    records = read_golden_records(FOLDER / "countdown_cases.jsonl").examples
    found = [finding for record in records for finding in check_golden_record(record)]
    # Right by operators that no prompt offers or within a tolerance: the default has neither.
    differ = ["cd074", "cd082", "cd084", "cd086", "cd087"]
    assert [f.record for f in found if f.status != "ok"] == differ
    assert {r.id: r.outputs["value"] for r in records}.items() >= {
        ("cd077", 0.1), ("cd077, source", 1.0)
    }  # fmt: skip
