"""The Countdown task: problems made from a seed, or read from JSONL files."""

import json
import math
import random
import re
import string
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rlx.plugin import Demonstration, Plugin, Problem, Split
from rlx_plugins.countdown.expression import evaluate_expression
from rlx_plugins.countdown.rewards import check_ground_truth
from rlx_plugins.countdown.scorer import verify_equation_strict
from rlx_plugins.countdown.search import Rules, WorkedExpression, find_solutions, random_expression

__all__ = ["CountdownFiles", "CountdownTask", "Demonstrations", "is_held_out", "read_files"]

_MAX_DRAWS = 100_000
_MAX_TRIES = 20_000
_MAX_SOLVED = 3  # counting the solutions of more numbers takes too long

_NUMBER = re.compile(r"[0-9]+")

Range = tuple[int, int]
_Record = tuple[tuple[int, ...], float]
_Trace = tuple[str, Sequence[str]]


class CountdownFiles(BaseModel):
    """JSONL files, one problem a line: `numbers` (or `nums`) and `target`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: Path
    test: Path


class Demonstrations(BaseModel):
    """What worked episodes for a warm start look like."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    correct: float = Field(0.4, ge=0, le=1)
    """Share that reaches the target; the others compute some other expression rightly."""
    form: Literal["turns", "sequence"] = "turns"
    """`turns`: a confidence is a second turn. `sequence`: answer, analysis and confidence are one
    turn, and every one is complete: one that ended after its answer would teach the model to end
    there, and a confidence that is not stated can earn nothing."""
    check: Literal["restate", "judge"] = "restate"
    """What the analysis of a `sequence` says of the answer's value and the target. `restate`:
    `17=99`, right or wrong. `judge`: `17!=99` where they differ."""
    confidence: float = Field(0.5, ge=0, le=1)
    """With `turns`: share with a second turn that states a confidence."""
    informed: float = Field(0.0, ge=0, le=1)
    """Share of confidences that know better: above 0.5 after a right answer, below after a wrong
    one. The others are uniformly random."""


class CountdownTask(Plugin):
    """Reach a target with given numbers, each used once.

    Problems are made by joining random numbers with random operators, so each can be solved by
    whole steps within `intermediate_range`, none of which is trivial (`x*1`, `x-x`, ...). A
    problem is the multiset of its numbers and its target; it belongs to the test split when
    `crc32(repr((sorted numbers, target))) % held_out` is 0, to the training split otherwise.
    """

    numbers: dict[int, float] | list[int] = Field(default=[3, 4])
    """How many numbers, with which weight; a list means equal weights."""
    number_range: Range = (1, 100)
    target_range: Range = (1, 999)
    operators: str = "+-*/"
    intermediate_range: Range | Literal["auto"] | None = "auto"
    """Bounds of every intermediate result; null for none. `auto` is from 0 to 100 or to the
    largest number or target, whichever is greater."""
    held_out: int = Field(7, ge=2)
    """One problem in so many is for testing."""
    files: CountdownFiles | None = None
    """Problems from files instead, each line of which must be in one split only. Training takes
    them in an order drawn anew from the seed for each pass, testing in the order of the file."""
    prompt: str = "nums: {numbers}\ntarget: {target}\n"
    demonstrations: Demonstrations = Demonstrations()

    @field_validator("numbers")
    @classmethod
    def _check_numbers(cls, value: dict[int, float] | list[int]) -> dict[int, float] | list[int]:
        weights = value if isinstance(value, dict) else dict.fromkeys(value, 1.0)
        if not weights or min(weights) < 1:
            raise ValueError("needs counts of at least one number")
        if not all(math.isfinite(w) and w >= 0 for w in weights.values()) or not sum(
            weights.values()
        ):
            raise ValueError("weights must be finite, not negative, and not all zero")
        return value

    @field_validator("operators")
    @classmethod
    def _check_operators(cls, value: str) -> str:
        if not value or len(set(value)) < len(value) or set(value) - set("+-*/"):
            raise ValueError("must be some of + - * /, each once")
        return value

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: str) -> str:
        names = {name for _, name, _, _ in string.Formatter().parse(value) if name is not None}
        if names != {"numbers", "target"}:
            raise ValueError("must hold {numbers} and {target} and no other field")
        return value

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        for name in ("number_range", "target_range", "intermediate_range"):
            bounds = getattr(self, name)
            if isinstance(bounds, tuple) and bounds[0] > bounds[1]:
                raise ValueError(f"{name}: {bounds[0]} is greater than {bounds[1]}")
        if self.number_range[0] < 0:
            raise ValueError("number_range: a number below 0 cannot be matched by the scorer")
        return self

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index` of a split; the same for the same arguments.

        Raises:
            OSError: a file cannot be read.
            ValueError: the options leave (almost) no problem for this split, or a file is
                malformed; the message names file and line.
        """
        if self.files:
            records = read_files(self.files)[split]
            position = index % len(records)
            if split == "train":
                position = _shuffle_countdown_indices(seed, index // len(records), len(records))[
                    position
                ]
            return self._problem(*records[position])
        return self._generate(split, random.Random(f"countdown/{seed}/{split}/{index}"))

    def check(self) -> None:
        """Reads the files, where problems come from files.

        Raises:
            OSError: one cannot be read.
            ValueError: as `problem`.
        """
        if self.files:
            read_files(self.files)

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns a worked answer, right or not, and perhaps a confidence.

        The form is `<think>5*3=15\\n15+2=17\\n</think><answer>5*3+2</answer>`, then as a second
        turn `<confidence>0.7</confidence>`. With `form: sequence` all is one turn, and an analysis
        stands in between that holds the answer's value against the target:
        `<analysis>17=99</analysis>`, or `17!=99` where it judges. Where a problem from a file shows
        no solution by whole steps in range among many tries, the answer is a wrong one.

        Raises:
            ValueError: no expression over the numbers stays within `intermediate_range`.
        """
        rng = random.Random(f"demonstration/{seed}/{problem.prompt}")
        worked = None
        if rng.random() < self.demonstrations.correct:
            worked = self._solve(problem, rng)
        text, steps = worked or self._draw(problem, rng)
        lines = "".join(f"{step}\n" for step in steps)
        answer = f"<think>{lines}</think><answer>{text}</answer>"
        if self.demonstrations.form == "sequence":
            value = steps[-1].rpartition("=")[2] if steps else text
            target = str(problem.fields["target"])
            differs = self.demonstrations.check == "judge" and value != target
            analysis = f"<analysis>{value}{'!=' if differs else '='}{target}</analysis>"
            return Demonstration((answer + analysis + self._confidence(problem, answer, rng),))
        if rng.random() >= self.demonstrations.confidence:
            return Demonstration((answer,))
        return Demonstration((answer, self._confidence(problem, answer, rng)))

    def corruption(self, sentence: str, seed: int) -> str | None:
        """Returns the line with its last number changed, as a slip of the pen would, to one within
        `intermediate_range`; None without a number, or without another one there."""
        found = list(_NUMBER.finditer(sentence))
        if not found:
            return None
        last = found[-1]
        bounds = self._rules()
        value, rng = int(last[0][:18]), random.Random(f"corruption/{seed}/{sentence}")
        low = max(bounds.low or 0, 0)
        near = max(low, value if bounds.high is None else min(value, bounds.high))
        high = near + 9 if bounds.high is None else min(bounds.high, near + 9)
        others = [n for n in range(max(low, near - 9), high + 1) if n != value]
        if not others:
            return None
        return f"{sentence[: last.start()]}{rng.choice(others)}{sentence[last.end() :]}"

    def canonical(self, answer: str) -> str:
        """Returns a text that is the same for expressions that are equal by algebra alone.

        Every number is replaced by a large one of its own, so that expressions which merely come to
        the same value stay apart; what cannot be computed stays as it is, but for white space.
        """
        disguised = _NUMBER.sub(lambda n: str(1 + zlib.crc32(n[0].encode()) % 1_000_003), answer)
        try:
            over, under = evaluate_expression(disguised, numeric="exact").as_integer_ratio()
        except ArithmeticError:
            return "".join(answer.split())
        return f"{over:x}/{under:x}"  # numbers of thousands of digits are slow to write in tens

    def _confidence(self, problem: Problem, answer: str, rng: random.Random) -> str:
        tenths = rng.randrange(11)
        if rng.random() < self.demonstrations.informed:
            right = verify_equation_strict(answer, dict(problem.fields))
            tenths = rng.randrange(6, 11) if right else rng.randrange(5)
        return f"<confidence>{tenths / 10:.1f}</confidence>"

    def _rules(self) -> Rules:
        bounds = self.intermediate_range
        if bounds == "auto":
            bounds = (0, max(100, self.number_range[1], self.target_range[1]))
        low, high = bounds or (None, None)
        return Rules(self.operators, low, high)

    def _generate(self, split: Split, rng: random.Random) -> Problem:
        counts = self.numbers
        if isinstance(counts, list):
            counts = dict.fromkeys(counts, 1.0)
        (count,) = rng.choices(list(counts), list(counts.values()))
        low, high = self.target_range
        rules = self._rules()
        for _ in range(_MAX_DRAWS):
            numbers = [rng.randint(*self.number_range) for _ in range(count)]
            worked = random_expression(numbers, rules, rng, trivial=False)
            if worked is None or not low <= worked.value <= high:
                continue
            if is_held_out(numbers, worked.value, self.held_out) == (split == "test"):
                return self._problem(numbers, worked.value, worked)
        raise ValueError(
            f"found no {split} problem of {count} numbers in {_MAX_DRAWS} draws: "
            "widen number_range, target_range or intermediate_range"
        )

    def _problem(
        self, numbers: Sequence[int], target: float, worked: WorkedExpression | None = None
    ) -> Problem:
        fields: dict[str, Any] = {
            "numbers": list(numbers),
            "target": target,
            "data_source": "countdown",
        }
        if worked:
            fields |= {"solution": worked.text, "steps": list(worked.steps)}
        if len(numbers) <= _MAX_SOLVED:
            fields["solutions"] = sum(1 for _ in find_solutions(numbers, target, self._rules()))
        shown = " ".join(map(str, numbers))
        return Problem(
            id=f"countdown/{'-'.join(map(str, sorted(numbers)))}={target}",
            prompt=self.prompt.format(numbers=shown, target=target),
            fields=fields,
            stratum=f"{len(numbers)} numbers",
        )

    def _solve(self, problem: Problem, rng: random.Random) -> _Trace | None:
        fields = problem.fields
        if "solution" in fields:
            return fields["solution"], fields["steps"]
        found = find_solutions(fields["numbers"], fields["target"], self._rules(), rng, _MAX_TRIES)
        worked = next(found, None)
        return (worked.text, worked.steps) if worked else None

    def _draw(self, problem: Problem, rng: random.Random) -> _Trace:
        numbers, rules = problem.fields["numbers"], self._rules()
        for _ in range(_MAX_TRIES):
            worked = random_expression(numbers, rules, rng, trivial=True)
            if worked is not None:
                return worked.text, worked.steps
        raise ValueError(f"no expression over {numbers} stays within intermediate_range")


def is_held_out(numbers: Sequence[int], target: float, one_in: int) -> bool:
    """Tells whether a problem belongs to the test split, whatever the order of its numbers."""
    key = repr((tuple(sorted(numbers)), target))
    return zlib.crc32(key.encode()) % one_in == 0


@lru_cache(maxsize=4)
def read_files(files: CountdownFiles) -> dict[Split, tuple[_Record, ...]]:
    """Reads both splits, once per process.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file has no problem, a line is malformed, or a problem of the test file is in
            the training file too.
    """
    train, test = _read_problem_file(files.train), _read_problem_file(files.test)
    known = {_build_record_key(record) for record in train}
    for number, record in enumerate(test, start=1):
        if _build_record_key(record) in known:
            raise ValueError(f"{files.test}, problem {number}: also in {files.train}")
    return {"train": train, "test": test}


def _build_record_key(record: _Record) -> tuple[tuple[int, ...], float]:
    return tuple(sorted(record[0])), record[1]


def _read_problem_file(path: Path) -> tuple[_Record, ...]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    records = tuple(
        _parse_problem_line(line, f"{path} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not records:
        raise ValueError(f"{path}: holds no problem")
    return records


def _parse_problem_line(line: str, where: str) -> _Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not a JSON object")
    try:
        check_ground_truth(record := {"numbers": record.get("nums"), **record})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    numbers, target = record["numbers"], record["target"]
    if not numbers or any(number != int(number) or number < 0 for number in numbers):
        raise ValueError(f"{where}: numbers must be whole and not negative, got {numbers}")
    whole = int(target) if target == int(target) else target
    return tuple(map(int, numbers)), whole


@lru_cache(maxsize=4)
def _shuffle_countdown_indices(seed: int, passes: int, size: int) -> list[int]:
    return random.Random(f"countdown/{seed}/pass {passes}").sample(range(size), size)
