"""Worked examples: shipped ones, and those where rlx differs on purpose."""

import json
from pathlib import Path

from golden_records import find_all_differences, find_differences
from rows import each_row

FOLDER = Path(__file__).parent
PEERS = ("gdpo", "kg_r1", "maxrl", "rlcr", "tinyzero", "trl_1_16_0", "verl_0_9_1")


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


@each_row("name", ["golden", *PEERS])
def test_every_shipped_record_is_ok(name):
    content = read(name)
    assert len(content["examples"]) >= 50
    assert all(record["outputs"] for record in content["examples"])
    assert not find_all_differences(content)


@each_row("name", PEERS)
def test_where_rlx_differs_on_purpose_it_differs(name):
    for record in read(name)["differences"]:
        found = find_differences(record)
        assert found and len(found) == len(record["outputs"]), record
        assert record["title"], record
