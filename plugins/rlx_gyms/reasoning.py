"""Data sets of reasoning-gym, and their scorers with a limit on processor time."""

import ast
import json
import math
import random
import re
import string
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rlx.plugin import Demonstration, Example, Problem, Reward, Sample, Score, Split
from rlx_gyms.libraries import (
    ATTEMPTS,
    GymTask,
    NeedsLibrary,
    import_library,
    is_installed,
    suggest_name,
)
from rlx_plugins.examples import build_example
from rlx_plugins.limited_call import LimitedResult, call_with_limit

_CHUNK = 256
"""Size of the datasets that entries are drawn from. Some generate all their entries at once."""
_RESERVED = ("seed", "size")
_MAX_CHARACTERS = 4000
"""Of an answer; a longer one earns 0."""
_SECONDS = 2.0
"""Processor time of one score, well below the deadline of the reward."""


@dataclass(frozen=True, slots=True)
class EntryAddress:
    """Where an entry comes from: a dataset with options as JSON, and a position below `_CHUNK`."""

    dataset: str
    config: str
    seed: int
    item: int


def list_datasets() -> tuple[str, ...]:
    """The names of all datasets but `composite`, whose place the task `mixture` takes."""
    factory = import_library("reasoning_gym.factory")
    import_library("reasoning_gym")
    return tuple(sorted(set(factory.DATASETS) - {"composite"}))


@lru_cache(maxsize=64)
def get_dataset(name: str, config: str, seed: int) -> Any:
    """A dataset of `_CHUNK` entries; raises ValueError for an unknown name or refused options."""
    names = list_datasets()
    if name not in names:
        hint = suggest_name(name, names, f"there are {len(names)}, such as chain_sum")
        raise ValueError(f"reasoning-gym has no dataset {name!r}; {hint}")
    dataset_class, config_class = import_library("reasoning_gym.factory").DATASETS[name]
    options = json.loads(config)
    known = [f.name for f in fields(config_class) if f.name not in _RESERVED]
    for option in options:
        if option in _RESERVED:
            raise ValueError(f"config.{option}: rlx derives it from the experiment's seed")
        if option not in known:
            hint = suggest_name(option, known, f"it has {', '.join(known) or 'none'}")
            raise ValueError(f"config: {name} has no option {option!r}; {hint}")
    try:
        made = config_class(**options, seed=seed, size=_CHUNK)
        if hasattr(made, "validate"):
            made.validate()
        dataset = dataset_class(config=made)
        dataset[0]  # some options are only refused where an entry is made
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"config: {name} refuses its options: {error}") from error
    return dataset


@lru_cache(maxsize=256)
def generate_entry(address: EntryAddress) -> Mapping[str, Any]:
    """The entry at an address: `question`, `answer` (None if none is stored), `metadata`."""
    dataset = get_dataset(address.dataset, address.config, address.seed)
    entry: Mapping[str, Any] = dataset[address.item]
    return entry


Entry = Mapping[str, Any]

_EVALUATED_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Their scorers give the answer to `eval`, to read a list."""
_PARSED_FORMULAS = frozenset(
    {"intermediate_integration", "polynomial_multiplication", "simple_integration"}
)
_PARSED_ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Their scorers give the answer to `parse_expr`, as those of `_PARSED_FORMULAS`."""

_is_arithmetic = re.compile(r"[0-9+\-*/()\s]+", re.ASCII).fullmatch
_formula_token = re.compile(
    r"(?P<name>[A-Za-z_]\w*)|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[-+*/^(),\s]", re.ASCII
)
_NAMES = frozenset(string.ascii_lowercase) | {"C", "E", "I"}
_FUNCTIONS = frozenset(
    {"Abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "pi", "sec"}
    | {"sin", "sinh", "sqrt", "tan", "tanh"}
)


def is_readable(dataset: str, answer: str, entry: Entry) -> bool:
    """Whether the dataset's scorer may read an answer: where it runs code, only plain mathematics.

    A formula consists of numbers, operators, variables of one letter, elementary functions, and the
    names in the stored answer. Calculus such as `Integral(x, x)` would state the problem again.
    """
    if dataset in _PARSED_ARITHMETIC:
        return _is_arithmetic(answer) is not None
    if dataset in _PARSED_FORMULAS:
        known = _NAMES | _FUNCTIONS | set(re.findall(r"[A-Za-z]\w*", str(entry["answer"])))
        return _find_names(answer) <= known
    return True


def score_entry(dataset: str, scorer: Any, answer: str, entry: Entry) -> float:
    """The scorer's value of a readable answer; 0 for a full score that it does not deserve."""
    if dataset in _EVALUATED_LITERALS:
        vars(sys.modules[type(scorer).__module__])["eval"] = ast.literal_eval
    value = float(scorer.score_answer(answer, entry))
    confirm = _CONFIRMATIONS.get(dataset)
    return 0.0 if value == 1.0 and confirm is not None and not confirm(answer, entry) else value


def _find_names(formula: str) -> set[str]:
    """The names in a formula; {formula} itself if it is none."""
    names, end = set(), 0
    for token in _formula_token.finditer(formula):
        if token.start() != end:
            break
        end = token.end()
        if token["name"]:
            names.add(token["name"])
    return names if end == len(formula) else {formula}


def _reaches(target: int, answer: str, entry: Entry) -> bool:
    """Whether an arithmetic answer uses the entry's numbers, each once, and is the target."""
    used = sorted(map(int, re.findall(r"[0-9]+", answer)))
    value = import_module("sympy").parse_expr(answer)
    return used == sorted(entry["metadata"]["numbers"]) and bool(value == target)


def _is_probability(answer: str, entry: Entry) -> bool:
    given, right = (float(Fraction(text.replace(",", ""))) for text in (answer, entry["answer"]))
    return math.isclose(given, right, rel_tol=1e-3)


_CONFIRMATIONS: Mapping[str, Callable[[str, Entry], bool]] = {
    # A value near the target is paid, and one that rounds down to it.
    "countdown": lambda answer, entry: _reaches(entry["metadata"]["target"], answer, entry),
    # Any four numbers in range are paid.
    "puzzle24": lambda answer, entry: _reaches(24, answer, entry),
    # 0 is paid for every probability, as a prefix of its digits.
    "coin_flip": _is_probability,
    # The distance of nan is paid as 0.
    "complex_arithmetic": lambda answer, _: "nan" not in answer.lower(),
    # Any text is paid.
    "game_of_life_halting": lambda answer, entry: answer == str(entry["answer"]),
}


def _build_score_example(
    name: str, answer: str, value: float, item: int = 0, **options: Any
) -> Example:
    address = EntryAddress("chain_sum", '{"max_digits": 1, "max_terms": 2}', 42, item)
    problem, spans = {"entry": asdict(address)}, {"answer": answer}
    return build_example(name, value, options=options, problem=problem, spans=spans)


class ReasoningGymScore(NeedsLibrary, Reward):
    """What the dataset's own scorer of reasoning-gym gives the text between the answer tags.

    A scorer that reads the answer as mathematics or code runs in a process of its own: that of
    countdown never returns on `99**98**97`. An answer on which it fails or takes too long earns 0.
    So does code that the scorer would run, and an answer that solves nothing but would be paid.
    """

    library: ClassVar[str] = "reasoning_gym"

    examples: ClassVar[tuple[Example, ...]] = (
        _build_score_example("gold", "7", 1.0),
        _build_score_example("other", "-5", 1.0, item=1),  # 2 - 7 = ?
        _build_score_example("wrong", "-1", 0.0),
        _build_score_example("hostile", "99**98**97", 0.1),  # it holds the right digit
        _build_score_example("partly", "7 or so", 0.0, partial=False),
    )

    partial: bool = True
    """Whether a dataset may give less than the full score for an answer that is nearly right.
    Without it such an answer earns 0, so that the reward is a label of correctness."""

    def value_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score(self, sample: Sample) -> Score:
        if "entry" not in sample.problem:
            raise ValueError("the problem is none of reasoning-gym: its task must be reasoning_gym")
        address = EntryAddress(**sample.problem["entry"])
        answer = sample.spans.get("answer", "").strip()
        if not answer:
            return Score(0.0, "no answer")
        if len(answer) > _MAX_CHARACTERS:
            return Score(0.0, f"longer than {_MAX_CHARACTERS} characters")
        if not is_readable(address.dataset, answer, generate_entry(address)):
            return Score(0.0, "no plain mathematics")
        result = _score_answer(address, answer)
        if result.fault is not None:
            return Score(0.0, f"not scored: {result.fault}")
        value = float(result.value)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{address.dataset} of reasoning-gym gave the score {value}")
        if value < 1.0 and not self.partial:
            return Score(0.0, "partly right" if value else "wrong answer")
        return Score(value, None if value else "wrong answer")


@lru_cache(maxsize=4096)
def _score_answer(address: EntryAddress, answer: str) -> LimitedResult:
    """The scorer's value: here if it only compares texts, else in a process of its own. Kept,
    because the answers of a group are often alike."""
    dataset = get_dataset(address.dataset, address.config, address.seed)
    entry = generate_entry(address)
    base = import_library("reasoning_gym.dataset").ProceduralDataset
    if type(dataset).score_answer is base.score_answer:
        return LimitedResult(dataset.score_answer(answer, entry))
    return call_with_limit(lambda: score_entry(address.dataset, dataset, answer, entry), _SECONDS)


class ReasoningGymTask(NeedsLibrary, GymTask):
    """Problems of a dataset of reasoning-gym: `dataset: chain_sum, config: {max_terms: 3}`.

    A hash of the question decides whether a problem is for training or for testing, whatever the
    seed. The task `mixture` mixes several datasets by weight. The reward is `reasoning_gym.score`.
    """

    library: ClassVar[str] = "reasoning_gym"

    dataset: str
    """Name of the dataset."""
    config: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the dataset, as its library documents them, but `seed` and `size`."""
    held_out: int = Field(5, ge=2)
    """One in `held_out` questions is held out for testing."""
    correct: float = Field(1.0, ge=0, le=1)
    """Share of demonstrations with the dataset's own answer; the others show that of another
    problem. With less than 1 there is something left for RL to learn."""
    confidences: bool = False
    """Whether a demonstration has a second turn with a random confidence, for the schedule
    `two_turn`. It teaches the form of a confidence and nothing else."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if is_installed("reasoning_gym"):  # otherwise `check` says so
            get_dataset(self.dataset, self.config_text, 0)
        return self

    def list_candidates(self, split: Split, index: int, seed: int) -> Iterator[tuple[str, Problem]]:
        for attempt in range(ATTEMPTS):
            address = self._locate_candidate(split, index, seed, attempt)
            entry = generate_entry(address)
            question = str(entry["question"])
            yield (
                question,
                Problem(
                    id=f"reasoning_gym/{self.dataset}/{zlib.crc32(question.encode()):08x}/"
                    f"{address.seed}-{address.item}",
                    prompt=question,
                    fields={
                        "data_source": self.dataset,
                        "entry": asdict(address),
                        "answer": entry["answer"],
                    },
                ),
            )

    @property
    def demonstrates(self) -> bool:
        if not is_installed("reasoning_gym"):  # otherwise `check` says so
            return True
        first = generate_entry(EntryAddress(self.dataset, self.config_text, 0, 0))
        return first["answer"] is not None

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns the dataset's own answer or another problem's, perhaps with a confidence."""
        if not self.demonstrates:
            raise NotImplementedError(f"{self.dataset} of reasoning-gym stores no answers")
        rng = random.Random(f"reasoning_gym/{seed}/{problem.id}")
        answer = problem.fields["answer"]
        if rng.random() >= self.correct:
            other = self.problem("train", rng.randrange(4 * _CHUNK), seed)
            answer = other.fields["answer"]
        stated = f"<confidence>{rng.randrange(11) / 10}</confidence>"
        turns = (f"<answer>{answer}</answer>", stated)
        return Demonstration(turns if self.confidences else turns[:1])

    def _locate_candidate(self, split: Split, index: int, seed: int, attempt: int) -> EntryAddress:
        """Where the candidates of a problem, and of no other, come from: a dataset of `_CHUNK`
        entries, which may take long to make, holds 16 for each of 16 problems."""
        side = 16
        chunk, place = divmod(index, _CHUNK // side)
        batch, turn = divmod(attempt, side)
        purpose = f"reasoning_gym/{self.dataset}/{seed}/{split}/{chunk}/{batch}"
        drawn = random.Random(purpose).getrandbits(31)
        return EntryAddress(self.dataset, self.config_text, drawn, place * side + turn)
