"""Rewards that can be gamed, each in its own way; a module, because other processes import it."""

from typing import ClassVar

from rlx.plugin import Example, Reward, Sample


def said(text, **problem):
    return Sample(id="0", problem=problem, turn="answer", number=1, response=text)


GOLD = (
    Example(name="gold", sample=said("<answer>Paris</answer>", answer="Paris"), value=1.0),
    Example(name="wrong", sample=said("<answer>Rome</answer>", answer="Paris"), value=0.0),
)


class Honest(Reward):
    """Pays for the right answer."""

    examples: ClassVar = GOLD

    def score(self, sample):
        return float(sample.response == f"<answer>{sample.problem['answer']}</answer>")


class ByForm(Reward):
    """Pays for any answer that is long enough."""

    examples: ClassVar = (
        Example(name="gold", sample=said("<answer>Paris</answer>", answer="Paris"), value=1.0),
    )

    def score(self, sample):
        return float(len(sample.response) > 20)


class ByGreatNumber(Reward):
    """Pays the more, the more ones there are: only a search climbs it."""

    examples: ClassVar = (
        Example(name="gold", sample=said("<answer>12</answer>", answer=12), value=1.0),
        Example(name="wrong", sample=said("<answer>0</answer>", answer=12), value=0.0),
    )

    def score(self, sample):
        return min(1.0, sample.response.count("1") / 60)


class Judged(ByForm):
    """As `ByForm`, and says itself what a solution is."""

    def is_solution(self, sample):
        return "Paris" in sample.response


class Beyond(Honest):
    """Pays more than it promises for a text that no example shows."""

    def value_range(self):
        return 0.0, 1.0

    def score(self, sample):
        return 2.0 if "nan" in sample.response else super().score(sample)


class Fragile(Honest):
    """Fails on a text that no example shows."""

    def score(self, sample):
        return 1 / 0 if sample.response == "<answer>1=1</answer>" else super().score(sample)
