"""Reading YAML: values, places, overrides, origins."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.errors import SpecError
from rlx.plan import read_spec
from rlx.spec import ExperimentSpec
from rlx.spec.reading.diagnostics import InvalidSpec
from rlx.spec.reading.reader import read_document
from rlx.spec.reading.yaml_source import parse_yaml_document, read_text

ROOT = Path(__file__).parents[2]
RLCR = ROOT / "experiments" / "rlcr.yaml"


def value(text):
    return parse_yaml_document(f"x: {text}", "t.yaml").tree["x"]


def test_reads_the_core_schema_of_yaml_1_2(subtests):
    for text, expected in (
        ("1e-5", 1e-5),
        ("3e-3", 3e-3),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-1.", -1.0),
        ("0o17", 15),
        ("0x1F", 31),
        ("0777", 777),
        ("+3", 3),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("12:30:45", "12:30:45"),
        ("2020-01-01", "2020-01-01"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("True", True),
        ("'true'", "true"),
        ("~", None),
        ("", None),
        ("<<", "<<"),
        ("=", "="),
        ("1e", "1e"),
    ):
        with subtests.test(text=text, expected=expected):
            got = value(text)
            assert got == expected
            assert type(got) is type(expected)


def test_keys_are_text_as_written():
    tree = parse_yaml_document("{2: a, 0x2: b, true: c, ~: d}", "t.yaml").tree
    assert tree == {"2": "a", "0x2": "b", "true": "c", "~": "d"}


def test_refuses_what_no_experiment_needs(tmp_path, monkeypatch, subtests):
    for data, says in (
        (b'"\\ud800": 1', "half of a surrogate pair"),
        (b"a: " + b"9" * 5000, "more than 400 digits"),
        (b"? [a]\n: 1", "a key must be plain text"),
    ):
        with subtests.test(data=data, says=says), monkeypatch.context() as monkeypatch:
            monkeypatch.chdir(tmp_path)
            Path("t.yaml").write_bytes(data)
            with pytest.raises(InvalidSpec) as caught:
                read_document(Path("t.yaml"))
            assert says in str(caught.value)


def test_says_why_a_file_cannot_be_opened(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        read_text(tmp_path / "missing.yaml")
    with pytest.raises(SpecError, match="directory"):
        read_text(tmp_path)


def test_settings_that_came_later_leave_the_digests_of_experiments_alone():
    tree = read_spec(RLCR, ["critic={}", "estimator={name: gae}"]).spec.dump_resolved()
    spec = ExperimentSpec.model_validate(tree)
    for section in ("optimizer", "critic"):
        without = {**tree, section: {k: v for k, v in tree[section].items() if k != "mini_batches"}}
        assert ExperimentSpec.model_validate(without).digest == spec.digest
        other = {**tree, section: {**tree[section], "mini_batches": 2}}
        assert ExperimentSpec.model_validate(other).digest != spec.digest
    assert spec.dump_resolved()["optimizer"]["mini_batches"] == 1


def test_patience_is_read_where_earlier_runs_had_it():
    spec = read_spec(RLCR.with_name("stock.yaml")).spec
    tree = spec.dump_resolved()
    rollout = dict(tree["rollout"])
    rollout["live"] = {**rollout["live"], "patience": rollout.pop("patience")}
    assert ExperimentSpec.from_record({**tree, "rollout": rollout}) == spec


def test_settings_that_are_gone_are_read_where_they_meant_what_rlx_does():
    changes = ["rollout.max_prompt_tokens={limit: 200}", "runner.launcher=ray"]
    spec = read_spec(RLCR, changes).spec
    tree = spec.dump_resolved()
    tree["rollout"]["max_prompt_tokens"]["on_longer"] = "drop"
    tree["runner"]["engine"] = "deepspeed"
    tree["runner"]["launcher"]["resources"] = {}
    tree["tracking"]["pictures"] = True
    assert ExperimentSpec.from_record(tree) == spec
    assert spec.digest == "ab9e85ed3a9cb97e", "as when it had `on_longer: drop`"
    tree["rollout"]["max_prompt_tokens"]["on_longer"] = "truncate"
    with pytest.raises(SpecError, match=r"has rollout\.max_prompt_tokens\.on_longer"):
        ExperimentSpec.from_record(tree)


def test_overrides_step_into_lists_and_make_mappings():
    changes = [
        "phases.1.steps=7",
        "phases.0.set.rollout.num_generations_answer=2",
        "phases.0.set.loss.aggregate=token_mean",
        "model.warm_start=",
        "model.warm_start.steps=9",
        "rollout.answer.stop=['</answer>', \"=\"]",
        "seed=1",
        "seed=2",
    ]
    spec = read_spec(RLCR, changes).spec
    assert spec.phases[1].steps == 7
    assert spec.phases[0].set["rollout.num_generations_answer"] == 2
    assert spec.phases[0].set["loss.aggregate"] == "token_mean"
    assert spec.model.warm_start.steps == 9
    assert spec.rollout.answer.stop == ("</answer>", "=")
    assert spec.seed == 2


def test_a_mapping_replaces_what_stood_there_and_a_path_changes_one_value():
    whole = read_spec(RLCR, ["model={kind: pretrained, path: some/model}"])
    assert whole.spec.model.path == "some/model"
    assert whole.origins["model.path"] == "--set"
    assert whole.origins["model.warm_start"] == "default"
    assert read_spec(RLCR, ["model.layers=1"]).spec.model.warm_start.steps == 800
    both = ["rewards.turn.brier={plugin: b, turn: confidence}", "rewards.turn.brier.weight=2"]
    assert read_spec(RLCR, both).spec.rewards.turn["brier"].weight == 2


def test_the_value_of_an_override_is_yaml(subtests):
    for text, expected in (
        ("'12'", "12"),
        ('"a: b"', "a: b"),
        ("a=b", "a=b"),
        ("{prompt}?", None),
        ("'{prompt}?'", "{prompt}?"),
        ("# x", None),
    ):
        with subtests.test(text=text, expected=expected):
            override = f"rollout.confidence.template={text}"
            if expected is None:
                with pytest.raises(InvalidSpec) as caught:
                    read_spec(RLCR, [override])
                assert caught.value.diagnostics[0].position.text == override
            else:
                assert read_spec(RLCR, [override]).spec.rollout.confidence.template == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-1, 1) | st.sampled_from("abc"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)
TREE = read_document(RLCR).tree
SETTINGS = ["rollout", "rewards.turn", "loss.entropy", "rollout.answer.spans", "rollout.schedule"]


def places(node, path=()):
    yield path
    for key, below in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(below, dict | list):
            yield from places(below, (*path, key))
        else:
            yield (*path, key)


@settings(max_examples=60, deadline=None)
@given(
    at=st.sampled_from([p for p in places(TREE) if p]),
    new=JSON,
    name=st.sampled_from(SETTINGS),
    set_to=JSON | st.sampled_from(["single", "two_turn"]),
)
def test_whatever_stands_in_the_file_the_answer_is_a_spec_or_a_report(
    tmp_path_factory, at, new, name, set_to
):
    tree = yaml.safe_load(yaml.safe_dump(TREE))
    tree["phases"][1]["set"] = {name: set_to}
    node = tree
    for step in at[:-1]:
        node = node[step]
    node[at[-1]] = new
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(yaml.safe_dump(tree))
    try:
        assert read_spec(path).spec.dump_resolved()
    except InvalidSpec as error:
        assert error.diagnostics
        assert all(d.position or not d.path[:-1] for d in error.diagnostics)


def test_the_byte_that_is_not_utf8_is_found_behind_a_byte_order_mark(tmp_path):
    path = tmp_path / "marked.yaml"
    path.write_bytes("name: \u00e9\u00e9".encode("utf-8-sig") + b"\xff\n")
    with pytest.raises(InvalidSpec, match="byte 0xff at 13") as refused:
        read_text(path)
    assert refused.value.diagnostics[0].position.column == 9


def test_null_in_a_list_of_a_file_that_extends_another_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {RLCR}\nphases: [~, ~]\n")
    with pytest.raises(InvalidSpec) as refused:
        read_spec(path)
    assert [one.path for one in refused.value.diagnostics] == [("phases", 0), ("phases", 1)]
