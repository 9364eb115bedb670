"""The JSON Schema that editors read."""

from pathlib import Path

import jsonschema
import pytest
from rows import each_row

from rlx.discovery import load_all_plugins
from rlx.spec.reading.yaml_source import parse_yaml_document
from rlx.spec.schema import experiment_schema

ROOT = Path(__file__).parents[2]
OURS = sorted(
    p for d in ("", "sources/", "gyms/") for p in (ROOT / "experiments").glob(f"{d}*.yaml")
)


def part(name):
    return experiment_schema({"reward": {"mine": None}})["$defs"][name]["properties"]


@pytest.fixture(scope="module")
def installed():
    """Validates by the schema with the options of every installed plugin."""
    schema = experiment_schema(load_all_plugins())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def read(name, text=""):
    """An experiment of ours, with a section of YAML over it."""
    whole = (ROOT / "experiments" / f"{name}.yaml").read_text(encoding="utf-8")
    tree = parse_yaml_document(whole, name).tree
    return {**tree, **(parse_yaml_document(text, name).tree or {})}


def count_faults(validator, tree):
    return len(list(validator.iter_errors(tree)))


def test_every_key_and_the_words_below_it_are_there():
    assert part("Lora")["targets"]["description"].startswith("Names of the linear layers")
    assert "system message" in part("TwoTurnRolloutSpec")["system"]["description"].lower()
    assert "above 0" in part("TurnReward")["requires"]["description"]
    assert part("PretrainedModelSpec")["chat_template"]["description"]
    assert part("RewardsSpec").keys() == {"turn", "global"}
    definitions = experiment_schema(load_all_plugins())["$defs"]
    nested = definitions["estimator.two_level.ConfidenceSpec"]["properties"]
    assert nested["ddof"]["description"].startswith("1 divides the variance")


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


def test_our_own_experiments_fit_it(installed, subtests):
    for path in OURS:
        with subtests.test(path=path):
            tree = parse_yaml_document(path.read_text(encoding="utf-8"), path.name).tree
            assert [error.message for error in installed.iter_errors(tree)] == []
            assert list(installed.iter_errors({**tree, "sede": 1}))


NESTED = "{plugin: by_data_source, turn: answer, sources: {x: {plugin: exact_match, NAME: answer}}}"


def test_options_of_plugins_are_known_by_their_names(installed, subtests):
    for section, option in (
        ("task: {plugin: countdown, NAME: [1, 9]}", "number_range"),
        ("rewards: {turn: {a: {plugin: exact_match, turn: answer, NAME: answer}}}", "span"),
        (f"rewards: {{turn: {{a: {NESTED}}}}}", "span"),
        ("rewards: {global: {a: {plugin: info, NAME: score}}}", "key"),
        ("rollout: {schedule: environment, environment: {plugin: kg, NAME: family}}", "graph"),
        ("rollout: {schedule: single, NAME: 4}", "num_generations_answer"),
        ("mask: {strategy: turn_spans, NAME: none}", "fallback"),
        ("mask: {NAME: none}", "fallback"),
        ("estimator: {name: gae, NAME: 0.9}", "lam"),
        ("estimator: {NAME: 0}", "ddof"),
        ("estimator: {name: two_level, confidence: {NAME: 0}}", "ddof"),
        ("credit: {placement: {NAME: turn_end}}", "plugin"),
        ("sampler: {engine: transformers, NAME: 4}", "max_rows"),
        ("runner: {launcher: {kind: slurm, NAME: 1}}", "nodes"),
    ):
        with subtests.test(section=section, option=option):
            names = (option, f"{option}x")
            fine, misspelt = (read("rlcr", section.replace("NAME", name)) for name in names)
            assert (count_faults(installed, fine), count_faults(installed, misspelt) > 0) == (
                0,
                True,
            )


@each_row(
    ("section", "faulty"),
    [
        ("credit: {placement: {plugin: turn_end, a: 1}}", True),
        ("estimator: {name: two_level, ddof: 2}", True),
        ("mask: {strategy: turn_spans, fallback: no}", True),
        ("estimator: {name: theirs, thing: 1}", False),  # which is not installed
    ],
)
def test_options_and_their_values_are_checked(installed, section, faulty):
    assert bool(count_faults(installed, read("rlcr", section))) == faulty


def test_a_plugin_that_cannot_be_imported_may_have_any_option():
    schema = experiment_schema({"estimator": {"broken": None}})
    tree = read("rlcr", "estimator: {name: broken, thing: 1}")
    assert count_faults(jsonschema.Draft202012Validator(schema), tree) == 0
