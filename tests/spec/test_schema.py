"""The JSON Schema that editors read."""

from pathlib import Path

import jsonschema

from rlx.spec import ExperimentSpec
from rlx.spec.reading.yaml_source import parse_yaml_document
from rlx.spec.schema import experiment_schema

ROOT = Path(__file__).parents[2]
OURS = sorted(
    p for d in ("", "sources/", "gyms/") for p in (ROOT / "experiments").glob(f"{d}*.yaml")
)


def part(name):
    return experiment_schema({"reward": ["mine"]})["$defs"][name]["properties"]


def test_every_key_and_the_words_below_it_are_there():
    assert part("Lora")["targets"]["description"].startswith("Names of the linear layers")
    assert "system message" in part("TwoTurnRolloutSpec")["system"]["description"].lower()
    assert "above 0" in part("TurnReward")["requires"]["description"]
    assert part("PretrainedModelSpec")["chat_template"]["description"]
    assert part("RewardsSpec").keys() == {"turn", "global"}


def test_every_whole_number_has_bounds():
    unbounded = [
        f"{name}.{key}"
        for name, model in ExperimentSpec.model_json_schema()["$defs"].items()
        for key, field in model.get("properties", {}).items()
        for shape in (field, *field.get("anyOf", ()))
        if shape.get("type") == "integer" and "enum" not in shape
        if not {"maximum", "exclusiveMaximum"} & shape.keys()
    ]
    assert unbounded == []


def test_our_own_experiments_fit_it(subtests):
    schema = experiment_schema({})
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in OURS:
        with subtests.test(path=path):
            tree = parse_yaml_document(path.read_text(encoding="utf-8"), path.name).tree
            assert [error.message for error in validator.iter_errors(tree)] == []
            assert list(validator.iter_errors({**tree, "sede": 1}))
    for wrong in (
        {"model": {"layer": 1}},
        {"rollout": {"schedule": "single", "num_generation_answer": 4}},
        {"sampler": {"engine": "transformers", "max_row": 4}},
        {"runner": {"launcher": {"kind": "slurm", "node": 1}}},
        {"optimizer": {"learning_rate": "fast"}},
    ):
        with subtests.test(wrong=wrong):
            assert list(validator.iter_errors(wrong))
