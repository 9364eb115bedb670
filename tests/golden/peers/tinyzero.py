"""TinyZero's own Countdown score, called as its authors do: `python tinyzero.py SOURCES FILE`."""

import sys

sys.path.insert(0, sys.argv[1])

from records import Records
from verl.utils.reward_score.countdown import compute_score

MARKER = "User: Using the numbers …, create an equation.\nAssistant: "
RESPONSES = [
    "<answer>{}</answer>", "<answer> {} </answer>", "so\n<answer>{}</answer>", "<answer>{}",
    "{}", "<answer>{}</answer>\n", "<answer>{}</answer> done", "<answer>\n{}\n</answer>",
    "<answer>1</answer><answer>{}</answer>", "<answer>{}</answer><answer></answer>",
]  # fmt: skip
EQUATIONS = [
    "", "x", "1+", "(1+2", "1/0", "1.5*2", "1 2", "1++2", "-1+4", "2**3", "7//2", "1e3", "0x10",
    "1,2", "1+2=3", "50+.0000003+.0000008+.0000009", "4*.5", "03.5",
]  # fmt: skip


def main() -> None:
    """Writes the records."""
    records = Records("TinyZero, its score of Countdown")
    draw = records.random
    for _ in range(60):
        numbers = [draw.randint(1, 60) for _ in range(draw.randint(2, 4))]
        equation, value = build_equation(draw, numbers)
        target = draw.choice([value, value, value + 1])
        if draw.random() < 0.25:
            numbers = numbers[1:] or numbers
        add(records, draw.choice(RESPONSES).format(equation), numbers, target)
    for equation in EQUATIONS:
        numbers = [int(n) for n in "".join(c if c.isdigit() else " " for c in equation).split()]
        for target in (3, 50, 2):
            add(records, f"<answer>{equation}</answer>", numbers, target)
    records.write()


def build_equation(draw, numbers: list[int]) -> tuple[str, float]:
    """A random equation that uses every number once, and its value."""
    text = str(numbers[0])
    for number in numbers[1:]:
        text = draw.choice([f"{text} {op} {number}" for op in "+-*"] + [f"({text}-{number})"])
    return text, eval(text)  # digits, + - * and parentheses


def add(records: Records, response: str, numbers: list[int], target: float) -> None:
    """Adds the score of one response."""
    score = compute_score(f"{MARKER}{response}", {"numbers": numbers, "target": target})
    given = {"response": response, "problem": {"numbers": numbers, "target": target}}
    records.add("rewards.countdown", given, {"value": float(score)}, {"allow_decimals": True})


if __name__ == "__main__":
    main()
