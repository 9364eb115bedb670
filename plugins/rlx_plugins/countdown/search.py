"""Generates and solves Countdown problems with whole intermediate results within bounds."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM = 3


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for a step: some of the operators `+-*/`, and inclusive bounds of every result."""

    operators: str
    low: int
    high: int

    def apply(self, operator: str, left: int, right: int) -> int | None:
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
        return value if self.low <= value <= self.high else None


@dataclass(frozen=True, slots=True)
class WorkedExpression:
    """An expression with its value and the steps of its computation, such as `5*3=15`.

    `text` has no more parentheses than needed; `level` is the precedence of its last operator.
    """

    value: int
    text: str
    level: int = _ATOM
    steps: tuple[str, ...] = ()


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
    """Whether a step effectively drops a number: `x*1`, `x/1`, `x-x`, `x+0`, `0*x` and so on."""
    if operator in "*/":
        return value in (0, left, right)
    return value == 0 or left == 0 or right == 0


def random_expression(
    numbers: Sequence[int], rules: Rules, rng: random.Random, *, trivial: bool
) -> WorkedExpression | None:
    """Combines numbers in random order with random operators; None if a step is not allowed.
    Without `trivial`, that is also one such as `x*1`, which drops a number."""
    items = [WorkedExpression(number, str(number)) for number in numbers]
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

    `rng` shuffles the search, and `limit` bounds the expressions that are examined: every further
    number takes about forty times longer.
    """
    seen: set[str] = set()
    items = [WorkedExpression(number, str(number)) for number in sorted(numbers)]
    for found in islice(_search_expressions(items, rules, rng), limit):
        if found.value == target and found.text not in seen:
            seen.add(found.text)
            yield found


@lru_cache(maxsize=1024)  # of two small numbers there are few pairs
def count_solutions(numbers: tuple[int, ...], rules: Rules) -> Counter[float]:
    """Counts what `find_solutions` yields for every value that sorted numbers can reach."""
    items = [WorkedExpression(number, str(number)) for number in numbers]
    values = {found.text: found.value for found in _search_expressions(items, rules, None)}
    return Counter(values.values())


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
