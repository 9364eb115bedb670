"""The scripted policy: what its good episodes earn, and its words."""

import json
import re
from dataclasses import replace
from pathlib import Path

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


def test_a_good_episode_earns_all_there_is():
    lessons = [TASK.lesson(i, 0) for i in (*range(100), *range(12_800, 13_100))]
    problems = [replace(p, fields=p.fields | {"mode": "good"}) for p in lessons]
    for seed, problem in enumerate(problems):
        _, _, samples = play(TASK, problem, seed)
        for sample in samples:
            judged = [r.score(sample) for r in (QueryValidity(), IsAnswer(), KgFormat())]
            assert [s.value for s in judged if s is not None] == [1.0, 1.0]
        assert KgExactMatch().score(samples[-1]).value == 1.0
        assert RetrievalQuality().score(samples[-1]).value == 1.0
        assert len(samples) == 1 + len(problem.fields["chain"])


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
