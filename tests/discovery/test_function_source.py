"""The source of functions that Python gives as plugins."""

import math
import pickle
import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Optional

import numpy as np
import pytest
import rows

from rlx.errors import SpecError
from rlx.plugin import Reward, Sample, reward
from rlx.plugin_files import KeptPlugin, collect_source, keep_plugin_source

LIMIT = 3
WORDS = {"yes": 1.0}
DIGITS = re.compile(r"\d+", re.ASCII)
TABLE = np.zeros(2)


def count_digits(text: str) -> int:
    return len("".join(DIGITS.findall(text)))


@cache
def is_even(number: int) -> bool:
    return number == 0 or is_odd(number - 1)


def is_odd(number: int) -> bool:
    return number != 0 and is_even(number - 1)


def digits(sample, *, least: int = LIMIT) -> float:
    return float(count_digits(sample.response) >= least)


def mutual(sample):
    return float(is_even(len(sample.response)))


def imported(sample: Sample, names: Optional[Sequence[str]] = None) -> float:  # noqa: UP045
    def inner(text: str) -> float:
        return math.sqrt(len(text)) + WORDS["yes"]

    return float(np.round(inner(sample.response)))


def build_closure(limit):
    def closure(sample):
        return float(len(sample.response) > limit)

    return closure


@reward(scope="sample")
def decorated(sample, *, least: int = LIMIT) -> float:
    """At least so many digits."""
    return float(count_digits(sample.response) >= least)


shorten = lambda text: text[:2]  # noqa: E731


def of_lambda(sample):
    return float(len(shorten(sample.response)))


def of_import(sample):
    import trees

    return float(trees is not None)


class Base(Reward):
    least: int = LIMIT


class Inherited(Base):
    """At least so many digits."""

    def score(self, sample):
        return float(count_digits(sample.response) >= self.least)


def of_array(sample):
    return float(TABLE[0])


def of_other_module(sample):
    return float(rows is not None)


def score_with(plugin, response):
    """The score by the text alone."""
    namespace = {"__name__": "kept"}
    exec(compile(collect_source(plugin), "kept.py", "exec"), namespace)
    made = namespace[plugin.__name__]
    sample = Sample(id="a", problem={}, turn="answer", number=1, response=response)
    return made().score(sample) if isinstance(made, type) else made(sample)


@rows.each_row(
    "plugin, response, score",
    [
        (digits, "a1b2c3", 1.0),
        (mutual, "ab", 1.0),
        (imported, "abcd", 3.0),
        (build_closure(2), "abc", 1.0),
        (Inherited, "a12", 0.0),
        (decorated, "a123", 1.0),
    ],
)
def test_source_is_complete(plugin, response, score):
    assert score_with(plugin, response) == score


@rows.each_row(
    "plugin, message",
    [
        (lambda sample: 1.0, "a lambda has no definition"),
        (partial(digits, least=2), "partial"),
        (of_array, "of_array uses TABLE, a value of type ndarray"),
        (build_closure(object()), "closure uses limit, a value of type object"),
        (of_other_module, "of_other_module uses the module rows, which is not installed"),
        (of_lambda, "of_lambda uses shorten, a lambda"),
        (of_import, "of_import imports trees, which is not installed"),
        (type("Made", (), {}), "Made has no source"),
    ],
)
def test_what_cannot_be_kept(plugin, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        collect_source(plugin)


@rows.each_row("plugin", [digits, decorated, Inherited])
def test_what_is_kept_is_loaded_by_its_digest_in_any_process(plugin, tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = keep_plugin_source(plugin)
    called = plugin.__name__
    assert re.fullmatch(rf"{called}\.py@[0-9a-f]{{16}}:{called}", name)
    assert name == keep_plugin_source(plugin)
    made = pickle.loads(pickle.dumps(KeptPlugin.parse(name).load()(least=2)))
    sample = Sample(id="a", problem={}, turn="answer", number=1, response="12")
    assert type(made).__module__.startswith("rlx.plugin_files.") and made.score(sample) == 1.0
