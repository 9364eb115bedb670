"""A shop: two tools, and a task that needs both of them."""

import hashlib
import operator
import random
from collections.abc import Sequence

from rlx.plugin import Demonstration, Plugin, Problem, Split

ITEMS = ("figs", "pears", "plums", "limes", "dates", "beans", "corn", "oats", "rice", "tea", "milk")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def _get_price(item: str) -> int:
    return 2 + hashlib.sha256(item.encode()).digest()[0] % 8


def look_up(item: str) -> int:
    """The price of one.

    Args:
        item: what is sold
    """
    if item not in ITEMS:
        raise ValueError(f"no {item[:20]} are sold")
    return _get_price(item)


def calculate(sum: str) -> int:
    """Two numbers and + - or *.

    Args:
        sum: such as 2*3
    """
    for sign, compute in _OPERATORS.items():
        left, found, right = sum.partition(sign)
        if found and left.isdecimal() and right.isdecimal() and len(sum) < 20:
            return compute(int(left), int(right))
    raise ValueError("write two numbers and a sign, such as 2*3")


class Shop(Plugin):
    """What some of an item cost. Train and test ask for different numbers of an item."""

    care: float = 0.5
    """Share of the warm start's calls that are right."""

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index`; the same for the same arguments."""
        rng = random.Random(f"shop/{seed}/{split}/{index}")
        while True:
            item, count = rng.choice(ITEMS), rng.randint(2, 19)
            tested = hashlib.sha256(f"{count} {item}".encode()).digest()[0] % 5 == 0
            if tested == (split == "test"):
                break
        answer = str(count * _get_price(item))
        fields = {"item": item, "count": count, "answer": answer, "data_source": "shop"}
        return Problem(id=f"shop/{count} {item}", prompt=f"{count} {item}?\n", fields=fields)

    def lesson(self, index: int, seed: int) -> Problem:
        """Returns problem number `index` of the warm start."""
        return self.problem("train", index, seed)

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns the answer alone, for schedules without tools."""
        return Demonstration((f"<answer>{problem.fields['answer']}</answer>",))

    def act(
        self, problem: Problem, turns: Sequence[str], observations: Sequence[str], seed: int
    ) -> str:
        """Looks up the price, multiplies and answers; often with a mistake."""
        rng = random.Random(f"shop/act/{seed}/{len(turns)}")
        is_right = rng.random() < self.care
        if not turns:
            item = problem.fields["item"] if is_right else rng.choice(ITEMS)
            return _write_call("look_up", "item", item)
        if len(turns) == 1:
            sign = "*" if is_right else rng.choice("+-*")
            written = f"{problem.fields['count']}{sign}{observations[0]}"
            return _write_call("calculate", "sum", written)
        return f"<answer>{observations[-1]}</answer>"


def _write_call(name: str, argument: str, value: str) -> str:
    call = f'{{"name": "{name}", "arguments": {{"{argument}": "{value}"}}}}'
    return f"<tool_call>{call}</tool_call>"
