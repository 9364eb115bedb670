"""Problems whose prompts are too long are dropped."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import each_row

from rlx.errors import SpecError
from rlx.model import Vocabulary, build_vocabulary_dialogue
from rlx.plugin import Problem
from rlx.rollout import PromptFit, build_rollout_plan, measure_prompt
from rlx.spec import PromptLimit, SingleRolloutSpec, TurnSpec, TwoTurnRolloutSpec

DIALOGUE = build_vocabulary_dialogue(Vocabulary.build_bytes())
TURN = TurnSpec(template="Q: {prompt}", max_new_tokens=10)
PLAN = build_rollout_plan(SingleRolloutSpec(answer=TURN))


def problem(text):
    return Problem(id=f"p/{len(text)}", prompt=text, fields={})


def fit(limit=20, context=100):
    return PromptFit(PLAN, DIALOGUE, context, PromptLimit(limit=limit))


def test_a_prompt_and_its_longest_dialogue_are_counted():
    length = measure_prompt(PLAN, problem("abc"), DIALOGUE)
    assert (length.prompt, length.dialogue) == (1 + len("Q: abc"), 1 + len("Q: abc") + 10)
    two = TwoTurnRolloutSpec(answer=TURN, confidence=TurnSpec(template="sure?", max_new_tokens=4))
    length = measure_prompt(build_rollout_plan(two), problem("abc"), DIALOGUE)
    assert length.dialogue == 1 + len("Q: abc") + 10 + 1 + len("sure?") + 4


@each_row("context", [100, 25], ids=["limit", "context"])
def test_what_fits(context):
    limit = 20 if context == 100 else None
    longest = 16 if context == 100 else 11  # BOS and "Q: " are four tokens, an answer ten
    exact, longer = problem("x" * longest), problem("abc" + "x" * longest)
    assert fit(limit, context).fits(exact) and not fit(limit, context).fits(longer)
    excess = fit(limit, context).describe_excess(longer)
    assert f"'p/{len(longer.prompt)}' has {longest + 7} tokens" in excess
    assert PromptFit(PLAN, DIALOGUE, context, None).fits(longer)


def test_what_never_fits_is_refused():
    with pytest.raises(SpecError, match="drops 1000 problems in a row"):
        fit(limit=2).draw_train(lambda _: problem("abc"), 0, 1)


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(lambda n: min(n) <= 16)


@given(lengths=LENGTHS, start=st.integers(0, 5), first=st.integers(1, 5), then=st.integers(1, 5))
@settings(max_examples=50)
def test_a_draw_continues_where_the_last_one_ended(lengths, start, first, then):
    """So a resumed run, which knows only how many problems were examined, draws the same."""

    def get_problem(number):
        return problem("x" * lengths[number % len(lengths)])

    whole = fit().draw_train(get_problem, start, first + then)
    one = fit().draw_train(get_problem, start, first)
    two = fit().draw_train(get_problem, start + one.examined, then)
    assert one.numbers + two.numbers == whole.numbers
    assert one.examined + two.examined == whole.examined
    assert all(len(p.prompt) <= 16 for p in whole.problems)
    assert whole.dropped == whole.examined - first - then


def test_held_out_problems_are_not_replaced():
    lengths = [3, 30, 5]
    drawn = fit().draw_held_out(lambda n: problem("x" * lengths[n]), range(3))
    assert (drawn.numbers, drawn.dropped) == ((0, 2), 1)
