"""The JSON Schema that editors read."""

from pathlib import Path

import jsonschema
import pytest

from rlx.spec.json_schema import experiment_schema
from rlx.spec.reading.yaml_source import parse_yaml_document

ROOT = Path(__file__).parents[2]
OURS = sorted(p for d in ("", "sources/") for p in (ROOT / "experiments").glob(f"{d}*.yaml"))


def part(name):
    return experiment_schema({"reward": ["mine"]})["$defs"][name]["properties"]


def test_every_key_and_the_words_below_it_are_there():
    assert part("Lora")["targets"]["description"].startswith("Names of the linear layers")
    assert "system message" in part("TwoTurnRolloutSpec")["system"]["description"].lower()
    assert "above 0" in part("TurnReward")["requires"]["description"]
    assert part("PretrainedModelSpec")["chat_template"]["description"]
    assert part("RewardsSpec").keys() == {"turn", "global"}


def test_plugin_names_are_examples():
    assert part("TurnReward")["plugin"]["examples"] == ["mine"]
    assert part("MaskUse")["strategy"]["examples"] == []


def test_every_whole_number_has_bounds():
    unbounded = [
        f"{name}.{key}"
        for name, model in experiment_schema({})["$defs"].items()
        for key, field in model.get("properties", {}).items()
        for shape in (field, *field.get("anyOf", ()))
        if shape.get("type") == "integer" and "enum" not in shape
        if not {"maximum", "exclusiveMaximum"} & shape.keys()
    ]
    assert unbounded == []


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_our_own_experiments_fit_it(path):
    validator = jsonschema.Draft202012Validator(experiment_schema({}))
    tree = parse_yaml_document(path.read_text(encoding="utf-8"), path.name).tree
    assert [error.message for error in validator.iter_errors(tree)] == []
    assert list(validator.iter_errors({**tree, "sede": 1}))
