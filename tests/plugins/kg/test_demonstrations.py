"""The scripted policy: what its good episodes earn, and that its poor ones are poor as they say."""

import json
import re
from dataclasses import replace
from pathlib import Path

from rows import each_row

import rlx.plugin
from rlx.plugin import Action, Sample
from rlx_plugins.kg.environment import KgEnvironment
from rlx_plugins.kg.questions import TYPES
from rlx_plugins.kg.rollout_rewards import KgExactMatch, RetrievalQuality
from rlx_plugins.kg.task import KgTask
from rlx_plugins.kg.turn_rewards import IsAnswer, KgFormat, QueryValidity

TASK = KgTask()
KG = KgEnvironment(hints=False)


def play(task, problem, seed):
    """Turns, steps and the samples that rewards are shown, of one scripted episode."""
    state = KG.reset(problem.fields, seed)
    turns, steps = [], []
    while not steps or not steps[-1].done:
        turns.append(task.act(problem, turns, [s.observation for s in steps], seed))
        steps.append(KG.step(state, Action(text=turns[-1], number=len(turns))))
        state = steps[-1].state
        assert len(turns) <= 4
    samples = [
        Sample(
            id="a",
            problem=problem.fields,
            turn=step.kind,
            number=number,
            response=turn,
            context=tuple(turns[: number - 1]),
            observations=tuple(s.observation for s in steps[: number - 1]),
            info=step.info,
            history=tuple(s.info for s in steps[: number - 1]),
        )
        for number, (turn, step) in enumerate(zip(turns, steps, strict=True), start=1)
    ]
    return turns, steps, samples


def lessons(count, mode, only=None):
    """Later lessons, played in a mode."""
    problems = [TASK.lesson(i, 0) for i in range(12_800, 12_800 + count)]
    return [
        replace(p, fields=p.fields | {"mode": mode}) for p in problems if only in (None, p.stratum)
    ]


# Good episodes ------------------------------------------------------------------------------------


def test_a_good_episode_earns_all_there_is():
    problems = [TASK.lesson(i, 0) for i in range(100)] + lessons(300, "good")
    for seed, problem in enumerate(problems):
        _, _, samples = play(TASK, problem, seed)
        for sample in samples:
            judged = [r.score(sample) for r in (QueryValidity(), IsAnswer(), KgFormat())]
            assert [s.value for s in judged if s is not None] == [1.0, 1.0]
        assert KgExactMatch().score(samples[-1]).value == 1.0
        assert RetrievalQuality().score(samples[-1]).value == 1.0
        assert len(samples) == 1 + len(problem.fields["chain"])


# Poor ones ----------------------------------------------------------------------------------------


def outcomes(mode, type_):
    problems = lessons(400, mode, type_)
    played = [play(TASK, problem, seed) for seed, problem in enumerate(problems)]
    assert len(played) > 20
    right = sum(KgExactMatch().score(samples[-1]).value for *_, samples in played) / len(played)
    return [[s.info for s in steps[:-1]] for _, steps, _ in played], right


@each_row(
    ("mode", "type_", "queries", "most"),
    [
        ("wrong_relation", "forward", 1, 0.0),
        ("wrong_direction", "inverse", 1, 0.1),
        ("short", "hop2", 1, 0.0),
        ("short", "neighbour", 1, 0.0),
        ("short2", "hop3", 2, 0.0),
        ("guess", "hop2", 0, 0.3),
    ],
)
def test_a_mistake_costs_the_answer(mode, type_, queries, most):
    infos, right = outcomes(mode, type_)
    assert {len(asked) for asked in infos} == {queries}
    assert right <= most


@each_row(("mode", "error"), [("invalid", "FORMAT_ERROR"), ("duplicate", "KG_SUCCESS")])
def test_a_slip_costs_a_turn_alone(mode, error):
    infos, right = outcomes(mode, "hop2")
    assert right == 1.0
    assert {len(asked) for asked in infos} == {3}
    assert {asked[0]["error"] for asked in infos} == {error}
    assert {asked[1]["duplicate"] for asked in infos} == {mode == "duplicate"}


# Words --------------------------------------------------------------------------------------------


def test_every_text_is_made_of_the_tokens_of_the_tokenizer_named_world():
    shipped = Path(rlx.plugin.__file__).parents[1] / "model" / "tokenizers" / "world.json"
    tokens = json.loads(shipped.read_text())["model"]["vocab"]
    known = re.compile("|".join(sorted(map(re.escape, tokens), key=len, reverse=True)))
    task = KgTask(types=dict.fromkeys(TYPES, 1.0))
    for index in [*range(300), *range(12_800, 14_500)]:
        problem = task.lesson(index, 1)
        turns, steps, _ = play(task, problem, index)
        for text in (f"{problem.prompt}\n", *turns, *(s.observation for s in steps)):
            assert "".join(known.findall(text)) == text
