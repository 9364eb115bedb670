"""Writes train.jsonl and test.jsonl: what judge.yaml's judge is asked, and what it should say.

    python experiments/judged/make_data.py

It rates functions and compares two of them, by their operators alone: the number is not looked at.
Some functions to compare are cut short. A rubric that no prompt shows makes each fence another one.
"""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import yaml

from rlx_plugins.judge import fill_judge_prompt

HERE = Path(__file__).parent
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
RATINGS, COMPARISONS, TESTS = 2400, 2400, 120
"""Rows of each kind; how many of them are in test.jsonl."""

Row = dict[str, str]


def main() -> None:
    """Writes both files."""
    for name, rows in build_rows().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (HERE / name).write_text(text, encoding="ascii")


def build_rows() -> dict[str, list[Row]]:
    """The rows of each file."""
    rng = random.Random(0)
    rated = collect_rows(RATINGS, build_rating(read_template("policy.yaml", "judged"), rng))
    pairs = collect_rows(COMPARISONS, build_comparison(read_template("ranked.yaml", "ranked"), rng))
    train = rated[TESTS:] + pairs[TESTS:]
    rng.shuffle(train)
    return {"train.jsonl": train, "test.jsonl": rated[:TESTS] + pairs[:TESTS]}


def read_template(name: str, reward: str) -> str:
    """The prompt with which an experiment asks the judge."""
    written = yaml.safe_load((HERE / name).read_text("utf-8"))
    return str(written["rewards"]["turn"][reward]["prompt"])


def collect_rows(count: int, build: Callable[[], list[Row]]) -> list[Row]:
    """So many rows with different prompts."""
    rows: dict[str, Row] = {}
    while len(rows) < count:
        rows.update({row["prompt"]: row for row in build()})
    return list(rows.values())


def build_rating(template: str, rng: random.Random) -> Callable[[], list[Row]]:
    """What builds a row with a function to rate."""

    def build() -> list[Row]:
        word, number = rng.choice(list(SIGNS)), rng.randint(2, 61)
        wanted = SIGNS[word]
        has = wanted if rng.random() < 0.5 else draw_other_sign(wanted, rng)
        answer = f"def f(x): return x {has} {number}"
        prompt = fill_judge_prompt(
            template, question=f"x {word} {number}", answer=answer, rubric=str(rng.random())
        )
        verdict = f'wants {wanted} has {has}\n{{"score": {int(has == wanted)}}}'
        return [{"kind": "rating", "prompt": prompt, "verdict": verdict}]

    return build


def build_comparison(template: str, rng: random.Random) -> Callable[[], list[Row]]:
    """What builds two rows with functions to compare, one for each order."""

    def build() -> list[Row]:
        word, number = rng.choice(list(SIGNS)), rng.randint(2, 61)
        one, two = (draw_function(SIGNS[word], number, rng) for _ in range(2))
        rows = []
        for first, second in ((one, two), (two, one)) if one != two else ():
            prompt = fill_judge_prompt(
                template,
                question=f"x {word} {number}",
                first=first,
                second=second,
                rubric=str(rng.random()),
            )
            wanted, has = SIGNS[word], [read_sign(first), read_sign(second)]
            right = [each == wanted for each in has]
            better = "tie" if right[0] == right[1] else "first" if right[0] else "second"
            verdict = f'wants {wanted} has {has[0]} or {has[1]}\n{{"better": "{better}"}}'
            rows.append({"kind": "comparison", "prompt": prompt, "verdict": verdict})
        return rows

    return build


def draw_function(sign: str, number: int, rng: random.Random) -> str:
    """A function of which anything may be wrong."""
    if rng.random() < 0.5:
        sign = draw_other_sign(sign, rng)
    if rng.random() < 0.2:
        number = rng.randint(2, 61)
    code = f"def f(x): return x {sign} {number}"
    return code[: rng.randint(3, len(code) - 4)] if rng.random() < 0.1 else code


def draw_other_sign(sign: str, rng: random.Random) -> str:
    """A wrong operator."""
    return rng.choice([each for each in SIGNS.values() if each != sign])


def read_sign(code: str) -> str:
    """The operator of a function, or a question mark."""
    found = re.fullmatch(r"def f\(x\): return x (.) \d+", code)
    return found[1] if found else "?"


if __name__ == "__main__":
    main()
