"""Schedules of another distribution, named in YAML with their own settings."""

import sys
from pathlib import Path

import pytest
from guests import installed
from rows import each_row

from rlx.errors import PluginError
from rlx.plan import check_file
from rlx.plugin import Problem
from rlx.rollout import build_rollout_plan, sample_rollout_trees
from rlx.spec.reading.diagnostics import InvalidSpec
from rlx.testing import check_schedule
from rlx.testing.schedules import ByteDialogue, RandomSession

COUNTDOWN = Path(__file__).parents[2] / "experiments" / "countdown.yaml"
SETTINGS = '''
from typing import ClassVar, Literal
from pydantic import Field
from rlx.plugin import Schedule, TurnSpec

class Draft(Schedule):
    """A prompt, drafts, and final answers below each draft."""
    counts: ClassVar = {"draft": "drafts", "answer": "answers"}
    schedule: Literal["draft"] = "draft"
    drafts: int = Field(3, ge=1)
    answers: int = Field(2, ge=1)
    draft: TurnSpec = TurnSpec(template="Draft: {prompt}")
    answer: TurnSpec = TurnSpec(template="Final", spans=("answer",))

class Retry(Schedule):
    """A prompt, answers, and a second try that quotes the first, of those without an answer."""
    implementation: ClassVar[str] = "page_retry_rule:sample_tries"
    counts: ClassVar = {"answer": "answers", "again": "tries"}
    schedule: Literal["retry"] = "retry"
    answers: int = Field(4, ge=1)
    tries: int = Field(1, ge=1, le=1)
    answer: TurnSpec = TurnSpec(spans=("answer",))
    again: TurnSpec = TurnSpec(template="You wrote: {first}", spans=("answer",))
    every: int = Field(1, ge=1)
    """Only every such answer is tried again."""

    def check(self):
        if self.every == 13:
            raise OSError("no number 13 here")

class Odd(Schedule):
    """Its number of turns is no field."""
    counts: ClassVar = {"answer": "number"}
    schedule: Literal["odd"] = "odd"
    answer: TurnSpec = TurnSpec()
'''
RULE = """
from rlx.rollout import (
    CompletionRequest, NO_PARENT, RolloutTree, Segment, build_turn_segment, encode_opening
)
from rlx.seeding import derive_seed

def prompt(parent, ids, text):
    return Segment(parent=parent, author="prompt", token_ids=ids, text=text)

def sample_tries(settings, problems, seeds, session, dialogue):
    template, system = settings.answer.template, settings.system
    openings = [encode_opening(dialogue, template, problem, system) for problem in problems]
    drawn = [tuple(derive_seed(s, "turn", i) for i in range(settings.answers)) for s in seeds]
    first = session.generate(
        [CompletionRequest(o.token_ids, None, d) for o, d in zip(openings, drawn)], settings.answer
    )
    trees, later = [], []
    for number, (opening, group, ones) in enumerate(zip(openings, first, drawn)):
        segments = [prompt(NO_PARENT, opening.token_ids, opening.text)]
        for i, (completion, seed) in enumerate(zip(group, ones)):
            turn = build_turn_segment(
                completion, dialogue, settings.answer, parent=0, number=1, kind="answer", seed=seed
            )
            segments.append(turn)
            if i % settings.every == 0:
                text = settings.again.template.replace("{first}", turn.text)
                reply = dialogue.reply(text, turn.token_ids)
                parent = len(segments) - 1
                segments.append(prompt(parent, reply, text))
                order = number * settings.answers + i
                context = opening.token_ids + turn.token_ids + reply
                seed = derive_seed(seed, "again")
                later.append((segments, len(segments) - 1, context, order, seed))
        trees.append(segments)
    second = session.generate(
        [CompletionRequest(c, order, (seed,)) for _, _, c, order, seed in later], settings.again
    )
    for (segments, parent, _, _, seed), (completion,) in zip(later, second):
        segments.append(build_turn_segment(
            completion, dialogue, settings.again, parent=parent, number=2, kind="again", seed=seed
        ))
    return [RolloutTree(problem, tuple(segments)) for problem, segments in zip(problems, trees)]
"""
POINTS = """[rlx.schedules]
draft = page_retry:Draft
retry = page_retry:Retry
odd = page_odd:Odd
"""


@pytest.fixture(autouse=True)
def guest(tmp_path, monkeypatch):
    begin, odd = SETTINGS.split("class Odd")
    odd = begin.partition("class Draft")[0] + "class Odd" + odd
    modules = {"page_retry": begin, "page_odd": odd, "page_retry_rule": RULE}
    with installed(tmp_path, monkeypatch, "rlx-retry", POINTS, **modules):
        yield


def read(rollout, *more):
    return check_file(COUNTDOWN, ["model.tokenizer=bytes", f"rollout={rollout}", *more])[0].spec


def grow(plan):
    problem = Problem(id="a", prompt="1", fields={})
    [tree] = sample_rollout_trees(plan, [problem], [1], RandomSession(), ByteDialogue())
    return [segment.kind for segment in tree.segments if segment.kind]


@each_row(
    ("value", "says", "code"),
    [
        ("{every: 2}", "missing key 'schedule' in 'rollout'", 2),
        ("{schedule: retry, max_turns: 2}", "'max_turns' belongs to 'environment'", 2),
        ("{schedule: odd}", "TypeError: Odd.counts names 'number', which is no field of it", 3),
    ],
)
def test_what_is_wrong_is_named_with_its_path(value, says, code):
    with pytest.raises(InvalidSpec, match=r"(?s)" + says) as caught:
        read(value)
    assert caught.value.exit_code == code
    assert caught.value.diagnostics[0].position is not None


def test_a_phase_changes_to_it_and_keeps_what_both_have():
    phases = "[{name: first, steps: 1}, {name: second, steps: 1, set: {rollout.schedule: retry}}]"
    spec = read("{schedule: single, prompts_per_step: 3}", f"phases={phases}")
    rollout = spec.resolve_phase_spec(spec.phases[1]).rollout
    assert (rollout.schedule, rollout.prompts_per_step, rollout.answers) == ("retry", 3, 4)


def test_its_own_function_samples_the_trees():
    plan = build_rollout_plan(read("{schedule: retry, answers: 3}").rollout)
    assert [(level.kind, level.count) for level in plan.levels] == [("answer", 3), ("again", 1)]
    assert grow(plan) == ["answer"] * 3 + ["again"] * 3
    assert grow(plan.copy_with_sampling(1, top_k=1)) == ["answer", "again"]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("def sample_tries(*_): return []", "one RolloutTree per problem, in order"),
        ("def sample_tries(*_): 1 / 0", "ZeroDivisionError"),
        ("def sample_trees(*_): pass", "page_retry_rule"),
        (RULE.replace('kind="again"', 'kind="more"'), "'more', not one of answer, again"),
        (RULE.replace("range(settings.answers)", "range(5)"), "a tree has 5 turns 'answer', not 4"),
    ],
)
def test_what_its_function_does_wrong_is_said(tmp_path, rule, says):
    (tmp_path / "page_retry_rule.py").write_text(rule)
    plan = build_rollout_plan(read("{schedule: retry}").rollout)
    with pytest.raises(PluginError, match=says):
        grow(plan)


def test_the_promises_find_what_depends_on_the_batch_and_a_number_of_its_own(tmp_path):
    module = tmp_path / "page_retry_rule.py"
    import page_retry

    check_schedule(page_retry.Draft)
    check_schedule(page_retry.Retry)
    module.write_text(RULE.replace("for s in seeds]", "for s in reversed(seeds)]"))
    sys.modules.pop("page_retry_rule")
    with pytest.raises(AssertionError, match="whatever is beside it"):
        check_schedule(page_retry.Retry)
