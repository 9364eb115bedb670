"""Tokenizers of tiny models: those that write any text, and the choice by a task's texts."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rows import each_row

from rlx.discovery import resolve_plugins
from rlx.errors import EnvironmentFault
from rlx.model import (
    Vocabulary,
    build_policy,
    build_vocabulary_dialogue,
    choose_vocabulary,
    find_text_faults,
    list_text_sources,
)
from rlx.model.tokenizer import tiny_tokenizer
from rlx.spec import ExperimentSpec, TinyModelSpec

TEXTS = [
    f"State the final answer to {i} + {7 * i % 91}. <think>{i}</think><answer>{i * 13}</answer>"
    for i in range(200)
]
TRAINED = Vocabulary.train(TEXTS)
BYTES = Vocabulary.build_bytes()
WRITES_ALL = pytest.mark.parametrize("vocabulary", [BYTES, TRAINED], ids=["bytes", "train"])


def pieces(vocabulary, text):
    return [vocabulary.decode([token]) for token in vocabulary.encode(text)]


@WRITES_ALL
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@example("of <unk> and <eos>")
@settings(max_examples=60)
def test_any_text_is_written_and_read_back(vocabulary, text):
    assert vocabulary.decode(vocabulary.encode(text)) == text
    if "<unk>" not in text:  # the name of the token; dialogues break up such names
        assert vocabulary.unk_token_id not in vocabulary.encode(text)


def test_what_one_token_is():
    assert pieces(BYTES, "a é") == ["a", " ", "\ufffd", "\ufffd"]
    assert pieces(TRAINED, "State 190 <answer>+7</answer>") == [
        *("State", " ", "1", "9", "0", " ", "<answer>", "+", "7", "</answer>")
    ]
    assert len(BYTES) == 260 < len(TRAINED) <= 1024


@each_row("name", ["bytes", "train", "arithmetic", "world"])
def test_transformers_and_a_folder_give_the_same_tokens(name, tmp_path):
    own = {"bytes": BYTES, "train": TRAINED}.get(name) or Vocabulary.load_shipped(name)
    other = tiny_tokenizer(own)
    text = "<think>" + (" capital of Denmark" if name == "world" else "3+4=7") + "</think>"
    own.save(tmp_path)
    again = Vocabulary.load_folder(tmp_path)
    assert again.digest == own.digest
    ids = own.encode(text)
    assert other.encode(text, add_special_tokens=False) == again.encode(text) == ids
    assert other.decode(ids) == own.decode(ids) == text
    assert (other.eos_token_id, other.bos_token_id) == (own.eos_token_id, own.bos_token_id)
    assert build_vocabulary_dialogue(own).open(text) == (own.bos_token_id, *ids)


def test_a_model_is_built_with_the_tokenizer_of_its_run(tmp_path):
    small = TinyModelSpec(hidden_size=32, heads=1, kv_heads=1, layers=1, intermediate_size=32)
    TRAINED.save(tmp_path / "tokenizer")
    policy = build_policy(small, 0, tmp_path / "tokenizer")
    assert policy.model.config.vocab_size == len(TRAINED)
    assert policy.dialogue.encode(TEXTS[3]) == tuple(TRAINED.encode(TEXTS[3]))
    assert build_policy(small, 0, tmp_path / "none").model.config.vocab_size == 142
    gone = small.model_copy(update={"tokenizer": "train"})
    with pytest.raises(EnvironmentFault, match="is gone"):
        build_policy(gone, 0, tmp_path / "none")


@each_row("damage", ["missing", "no JSON", "no end token"])
def test_a_damaged_folder_is_named(tmp_path, damage):
    BYTES.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    if damage == "missing":
        (tmp_path / "tokenizer.json").unlink()
    else:
        config.write_text("{" if damage == "no JSON" else json.dumps({"bos_token": "<bos>"}))
    with pytest.raises(EnvironmentFault, match=r"model\.tokenizer"):
        Vocabulary.load_folder(tmp_path)


@pytest.fixture
def english(tmp_path):
    """Builds an experiment on 40 questions in English, one of which is long."""
    file = tmp_path / "english.jsonl"
    lines = [{"question": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(39)]
    lines.append({"question": "Why? " * 200, "answer": "0"})
    file.write_text("\n".join(json.dumps(line) for line in lines))

    def build(**sections):
        task = {"plugin": "dataset", "train": {"path": str(file)}, "held_out": 0.2}
        tree = {
            "name": "english",
            "model": {"kind": "tiny", "max_position": 300},
            "task": {**task, "prompt": "{question}"},
            "rollout": {"schedule": "single", "answer": {"max_new_tokens": 20}},
            "rewards": {"turn": {"accuracy": {"plugin": "exact_match", "turn": "answer"}}},
            "phases": [{"name": "all", "steps": 2}],
        }
        return ExperimentSpec.model_validate_json(json.dumps({**tree, **sections}))

    return build


def sources(spec):
    return list_text_sources(spec, resolve_plugins(spec))


def faults(spec):
    vocabulary = choose_vocabulary(spec, resolve_plugins(spec))
    dialogue = build_vocabulary_dialogue(vocabulary)
    return list(find_text_faults(sources(spec), dialogue, spec.model.max_position, 100))


def test_the_default_follows_the_task(english):
    countdown = english(
        task={"plugin": "countdown", "number_range": [1, 20], "target_range": [1, 99]},
        rewards={"turn": {"accuracy": {"plugin": "countdown.verify", "turn": "answer"}}},
    )
    chosen = choose_vocabulary(countdown, resolve_plugins(countdown))
    assert chosen.digest == Vocabulary.load_shipped("arithmetic").digest
    first, second = (
        choose_vocabulary(spec, resolve_plugins(spec))
        for spec in (english(seed=0), english(seed=7))
    )
    assert first.digest == second.digest  # runs of several seeds share it
    assert " plus" in pieces(first, "What is 7 plus 7?")


def test_what_cannot_be_written_or_does_not_fit_is_found(english):
    closed = english(model={"kind": "tiny", "tokenizer": "arithmetic"})
    (fault,) = faults(closed)
    assert fault.path == ("model", "tokenizer") and "no token for 'W'" in fault.message
    (fault,) = faults(english())
    assert fault.path == ("task",) and "1 of the first 28 problems do not fit" in fault.message
    assert "max_prompt_tokens" in fault.helps[0]
    limited = {"schedule": "single", "answer": {"max_new_tokens": 20}}
    assert not faults(english(rollout={**limited, "max_prompt_tokens": {}}))
    found = faults(english(rollout={**limited, "max_prompt_tokens": {"limit": 1}}))
    assert found and all("do not fit" in fault.message for fault in found)


def test_a_long_run_on_generated_problems_is_checked_by_the_first_of_them(english, monkeypatch):
    monkeypatch.setattr("rlx.model.text_checks.GENERATED_PROBLEMS", 50)
    spec = english(
        task={"plugin": "countdown", "number_range": [1, 20], "target_range": [1, 99]},
        rewards={"turn": {"accuracy": {"plugin": "countdown.verify", "turn": "answer"}}},
        phases=[{"name": "all", "steps": 10**6}],
    )
    dialogue = build_vocabulary_dialogue(choose_vocabulary(spec, resolve_plugins(spec)))
    (fault,) = find_text_faults(sources(spec), dialogue, 4, None)
    assert "50 of the first 50 problems do not fit" in fault.message
