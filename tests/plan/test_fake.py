"""Made-up responses, and the vocabulary that stands in where a tokenizer is missing."""

import re
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from rows import each_row

from rlx.discovery import resolve_plugins
from rlx.model import PlainDialogue, load_local_dialogue
from rlx.phase_setup import build_setup
from rlx.plan import check_file
from rlx.plan.trial import (
    ResponseAuthor,
    TreeSession,
    WordVocabulary,
    find_right_answers,
    fit_to_vocabulary,
    load_plan_problems,
    load_speech,
)
from rlx.rollout import sample_rollout_trees
from rlx.spec import TinyModelSpec

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TEXTS = st.text(max_size=60)


@given(TEXTS)
@example("a <|endoftext|> b_1")
def test_a_stand_in_writes_any_text_and_reads_it_back(text):
    dialogue = PlainDialogue(WordVocabulary(), (0,))
    ids = (*dialogue.encode(text), dialogue.end_ids[0])
    read, ends = dialogue.read(ids)
    assert read == text == "".join(map(dialogue.piece, ids[:-1]))
    assert len(ends) == len(ids) and list(ends) == sorted(ends) and ends[-1] == len(text)


def grown(name):
    read, _ = check_file(EXPERIMENTS / f"{name}.yaml")
    parts = build_setup(read.spec.resolve_phase_spec(read.spec.phases[-1]))
    speech = load_speech(parts.spec, resolve_plugins(parts.spec)).dialogue
    problems = load_plan_problems(parts.spec, parts.task, 2).problems
    author = ResponseAuthor(parts.plan, parts.spec, parts.task, speech)
    session = TreeSession(author, problems, 2048)
    return parts, sample_rollout_trees(parts.plan, problems, (1, 2), session, speech)


@each_row("name", ["countdown", "rlcr", "rlcr_coupled", "rlcr_1.5b"])
def test_a_group_holds_what_training_meets(name):
    parts, trees = grown(name)
    for tree in trees:
        groups = {}
        for segment in tree.segments:
            if segment.author == "policy":
                groups.setdefault((segment.kind, segment.parent), []).append(segment)
        for (kind, _), group in groups.items():
            (level,) = (level for level in parts.plan.levels if level.kind == kind)
            assert len(group) == level.count
            assert [s.spans for s in group].count({}) >= 1
            assert [s.finish_reason for s in group].count("length") == 1
            assert any(s.spans for s in group)
            if level.count >= 5:
                assert len({s.token_ids for s in group}) < level.count
            assert all(len(s.token_ids) <= level.turn.max_new_tokens for s in group)
    stated = re.findall(r"<confidence>(.*?)</confidence>", str(trees))
    assert len(set(stated)) != 1


def test_right_answers_are_guessed_from_the_record():
    assert find_right_answers({"question": "?", "answer": "so it is\n#### 72"}) == ["72"]
    assert find_right_answers({"reward_model": {"ground_truth": ["a", 5]}}) == ["a", "5"]
    assert find_right_answers({"target": 14, "solution": "7+3+4"}) == ["7+3+4", "14"]
    assert find_right_answers({"numbers": [1]}) == []


@given(TEXTS)
@example("1.1")
def test_whatever_is_writable_is_written(text):
    speech = ARITHMETIC
    speech.encode(fit_to_vocabulary(speech, f"<think>{text}</think>"))
    assert fit_to_vocabulary(speech, "<answer>7+100</answer>") == "<answer>7+100</answer>"


ARITHMETIC = load_local_dialogue(TinyModelSpec())
