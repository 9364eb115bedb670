"""Making and solving Countdown problems: expressions whose every step stays whole and in range."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

__all__ = ["Rules", "WorkedExpression", "find_solutions", "random_expression"]

_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM = 3


@dataclass(frozen=True, slots=True)
class Rules:
    """What a step may do.

    Attributes:
        operators: some of `+-*/`.
        low, high: bounds of every intermediate result, both included; None where there is none.
    """

    operators: str
    low: int | None
    high: int | None

    def apply(self, operator: str, left: int, right: int) -> int | None:
        """Returns the whole result of a step, or None where the step is not allowed."""
        if operator == "+":
            value = left + right
        elif operator == "-":
            value = left - right
        elif operator == "*":
            value = left * right
        elif right == 0 or left % right:
            return None
        else:
            value = left // right
        if (self.low is not None and value < self.low) or (
            self.high is not None and value > self.high
        ):
            return None
        return value


@dataclass(frozen=True, slots=True)
class WorkedExpression:
    """An expression, its value, and how one gets there.

    Attributes:
        text: with parentheses only where they are needed.
        level: how tightly its last operator binds.
        steps: such as `("5*3=15", "15+2=17")`, in an order in which each can be worked out.
    """

    value: int
    text: str
    level: int = _ATOM
    steps: tuple[str, ...] = ()

    @classmethod
    def from_number(cls, number: int) -> "WorkedExpression":
        """One of the given numbers, which must not be negative."""
        return cls(number, str(number))


def _combine_expressions(
    operator: str, left: WorkedExpression, right: WorkedExpression, value: int
) -> WorkedExpression:
    level = _LEVEL[operator]
    left_text = left.text if left.level >= level else f"({left.text})"
    loose = right.level < level or (right.level == level and operator in "-/")
    right_text = f"({right.text})" if loose else right.text
    step = f"{left.value}{operator}{right.value}={value}"
    return WorkedExpression(
        value, left_text + operator + right_text, level, (*left.steps, *right.steps, step)
    )


def _is_trivial(operator: str, left: int, right: int, value: int) -> bool:
    """Whether a step only drops a number: `x*1`, `x/1`, `x-x`, `x+0`, `0*x` and the like."""
    if operator in "*/":
        return value in (0, left, right)
    return value == 0 or left == 0 or right == 0


def random_expression(
    numbers: Sequence[int], rules: Rules, rng: random.Random, *, trivial: bool
) -> WorkedExpression | None:
    """Joins numbers in random order by random operators; None where a draw led nowhere.

    Args:
        trivial: whether a step may be one that only drops a number, such as `x*1`.
    """
    items = [WorkedExpression.from_number(number) for number in numbers]
    while len(items) > 1:
        left = items.pop(rng.randrange(len(items)))
        right = items.pop(rng.randrange(len(items)))
        operator = rng.choice(rules.operators)
        value = rules.apply(operator, left.value, right.value)
        if value is None:
            return None
        if not trivial and _is_trivial(operator, left.value, right.value, value):
            return None
        items.append(_combine_expressions(operator, left, right, value))
    return items[0]


def find_solutions(
    numbers: Sequence[int],
    target: float,
    rules: Rules,
    rng: random.Random | None = None,
    limit: int | None = None,
) -> Iterator[WorkedExpression]:
    """Yields every expression over all the numbers that reaches the target, each text once.

    Operands of `+` and `*` come in one order only. Three numbers take well under a millisecond,
    every number after that about forty times longer.

    Args:
        rng: shuffles the order of the search; without one it is fixed.
        limit: how many expressions to look at; None for all.
    """
    seen: set[str] = set()
    items = [WorkedExpression.from_number(number) for number in sorted(numbers)]
    for found in islice(_search_expressions(items, rules, rng), limit):
        if found.value == target and found.text not in seen:
            seen.add(found.text)
            yield found


def _search_expressions(
    items: list[WorkedExpression], rules: Rules, rng: random.Random | None
) -> Iterator[WorkedExpression]:
    if len(items) == 1:
        yield items[0]
        return
    steps = [
        (operator, i, j)
        for i in range(len(items))
        for j in range(len(items))
        for operator in rules.operators
        if i != j and (operator in "-/" or i < j)
    ]
    if rng:
        rng.shuffle(steps)
    for operator, i, j in steps:
        value = rules.apply(operator, items[i].value, items[j].value)
        if value is not None:
            rest = [item for k, item in enumerate(items) if k not in (i, j)]
            yield from _search_expressions(
                [_combine_expressions(operator, items[i], items[j], value), *rest], rules, rng
            )
