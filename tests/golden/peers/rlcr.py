"""RLCR's own reward functions on responses of every kind: `python rlcr.py SOURCES FILE`."""

import math
import sys

sys.path.insert(0, sys.argv[1])

from records import Records
from reward_fns import accuracy_reward, brier_reward, format_reward

ANSWERS = {"right": "42", "wrong": "41", "empty": ""}
CONFIDENCES = [
    "0", "1", "0.5", ".5", "1.", "0.25", " 0.75 ", "\n0.9\n", "+0.5", "-0.0", "0.0000001",
    "80", "80%", "0,8", "maybe", "", " ", "-0.1", "1.01", "1.0000001", "inf", "-inf", "1/2",
    "0.5 or so", "0.5</confidence><confidence>0.6", "0.5</confidence> and <confidence>80",
]  # fmt: skip
LOOSE = {
    "nan": "a confidence must be a number",
    "1e-1": "exponents are not read",
    "0.5_0": "underscores are not read",
    "٠.٥": "only ASCII digits are read",
}
"""What Python's `float` reads and rlx does not."""
SHAPES = {
    "ta": "<think>{think}</think>{gap}<answer>{answer}</answer>{end}",
    "tac": "<think>{think}</think>{gap}<answer>{answer}</answer>{gap}"
    "<confidence>{confidence}</confidence>{end}",
    "tabc": "<think>{think}</think>{gap}<answer>{answer}</answer>{gap}"
    "<analysis>{think}</analysis>{gap}<confidence>{confidence}</confidence>{end}",
    "tbac": "<think>{think}</think>{gap}<analysis>{think}</analysis>{gap}"
    "<answer>{answer}</answer>{gap}<confidence>{confidence}</confidence>{end}",
}
BROKEN = [
    ("<answer>", ""), ("</answer>", ""), ("</think>", ""), ("<think>", ""), ("<confidence>", ""),
    ("</confidence>", ""), ("<analysis>", ""), ("</analysis>", " "), ("</think>", "</think> so"),
    ("</answer>", "</answer> thus "), ("<answer>", "<answer>40</answer><answer>"),
]  # fmt: skip


def main() -> None:
    """Writes the records."""
    records = Records("RLCR (arXiv 2507.16806), its reward functions")
    for pattern, shape in SHAPES.items():
        for text in list_responses(records, pattern, shape):
            score_response(records, pattern, text)
        for confidence, why in LOOSE.items() if "c" in pattern else ():
            text = fill(shape, confidence=confidence)
            (form,) = format_reward(pattern, [[{"content": text}]])
            given = {"response": text}
            records.add(
                "rewards.rlcr.format", given, {"value": form}, {"pattern": pattern}, differs=why
            )
    records.write()


def fill(shape: str, **parts: str) -> str:
    """A response of a shape."""
    usual = {"think": "6*7", "gap": "\n", "answer": "42", "confidence": "0.5", "end": ""}
    return shape.format(**{**usual, **parts})


def list_responses(records: Records, pattern: str, shape: str) -> list[str]:
    """Responses of one shape, well formed and broken."""
    responses = [fill(shape, answer=answer) for answer in ANSWERS.values()]
    responses += [fill(shape, gap=gap) for gap in ("", "  \n\t", " so ")]
    responses += [fill(shape, end=end) for end in ("\n", "  \n \n", " done", "<answer>42</answer>")]
    responses += [fill(shape, think=think) for think in ("", "a\nb", "</think><answer>1</answer>")]
    if "c" in pattern:
        responses += [
            fill(shape, answer=answer, confidence=confidence)
            for confidence in CONFIDENCES
            for answer in (ANSWERS["right"], ANSWERS["wrong"])
        ]
    whole = fill(shape)
    responses += [whole.replace(old, new) for old, new in BROKEN if old in whole]
    responses += [whole[: records.random.randrange(len(whole))] for _ in range(3)]
    return list(dict.fromkeys(["", "42", *responses]))


def score_response(records: Records, pattern: str, text: str) -> None:
    """Adds the records of one response, and all three rewards of it together."""
    completions = [[{"content": text}]]
    (form,) = format_reward(pattern, completions)
    (right,) = accuracy_reward(pattern, completions, ["42"], ["hotpot"])
    (brier,) = brier_reward(pattern, completions, ["42"], ["hotpot"])
    assert not any(map(math.isnan, (form, right, brier)))
    response = {"response": text}
    records.add("rewards.rlcr.format", response, {"value": float(form)}, {"pattern": pattern})
    if form and "c" in pattern:
        turn = {**response, "of": float(right)}
        records.add("rewards.rlcr.brier", turn, {"value": float(brier)})
    scores = {"format": float(form), "accuracy": float(right), "brier": float(brier)}
    records.note("responses", {"pattern": pattern, **response, **scores})


if __name__ == "__main__":
    main()
