"""The reward `reasoning_gym.score`: the score of a dataset's own scorer."""

from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field

from rlx.plugin import Example, Reward, Sample, Score
from rlx_gyms.bounded import BoundedResult, call_with_limit
from rlx_gyms.libraries import NeedsLibrary, import_library
from rlx_gyms.reasoning.entries import EntryAddress, generate_entry, get_dataset
from rlx_gyms.reasoning.scorers import is_readable, score_entry

__all__ = ["ReasoningGymScore"]


def _build_score_example(
    name: str, answer: str, value: float, item: int = 0, **options: Any
) -> Example:
    """An example with the question 4 + 3 = ?, or another one of the same dataset."""
    sample = Sample(
        id="a",
        problem={
            "entry": {
                "dataset": "chain_sum",
                "config": '{"max_digits": 1, "max_terms": 2}',
                "seed": 42,
                "item": item,
            },
        },
        turn="answer",
        number=1,
        response=f"<answer>{answer}</answer>",
        spans={"answer": answer},
    )
    return Example(name=name, sample=sample, value=value, options=options)


class ReasoningGymScore(NeedsLibrary, Reward):
    """What the dataset's own scorer of reasoning-gym gives the text between the answer tags.

    A scorer that reads the answer as mathematics or code runs in a process of its own with a limit
    on its time: that of countdown never returns on `99**98**97`. An answer on which it fails or
    takes too long earns 0. So does code where the scorer would run it, and an answer that solves
    nothing where the scorer would pay for it; see `rlx_gyms.reasoning.scorers`.
    """

    library: ClassVar[str] = "reasoning_gym"

    examples: ClassVar[tuple[Example, ...]] = (
        _build_score_example("gold", "7", 1.0),
        _build_score_example("other", "-5", 1.0, item=1),  # 2 - 7 = ?
        _build_score_example("wrong", "-1", 0.0),
        _build_score_example("hostile", "99**98**97", 0.1),  # it holds the right digit
        _build_score_example("partly", "7 or so", 0.0, partial=False),
    )

    span: str | None = "answer"
    """The span to read; null for the whole response."""
    partial: bool = True
    """Whether a dataset may give less than the full score for an answer that is nearly right.
    Without it such an answer earns 0, so that the reward is a label of correctness."""
    max_length: int = Field(4000, ge=1)
    """Longest answer in characters; a longer one earns 0."""
    seconds: float = Field(2.0, gt=0, le=60)
    """Processor time of one score; keep it well below the reward's `deadline`."""

    def value_range(self) -> tuple[float, float]:
        """From 0 to 1, as every dataset of the library."""
        return 0.0, 1.0

    def score(self, sample: Sample) -> Score:
        """Scores one answer.

        Raises:
            ImportError: reasoning-gym is missing.
            ValueError: the problem is none of reasoning-gym, or the score is not in [0, 1].
        """
        address = EntryAddress.from_fields(sample.problem)
        text = sample.response if self.span is None else sample.spans.get(self.span, "")
        answer = text.strip()
        if not answer:
            return Score(0.0, "no answer")
        if len(answer) > self.max_length:
            return Score(0.0, f"longer than {self.max_length} characters")
        if not is_readable(address.dataset, answer, generate_entry(address)):
            return Score(0.0, "no plain mathematics")
        result = _score_answer(address, answer, self.seconds)
        if result.fault is not None:
            return Score(0.0, f"not scored: {result.fault}")
        value = float(result.value)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{address.dataset} of reasoning-gym gave the score {value}")
        if value < 1.0 and not self.partial:
            return Score(0.0, "partly right" if value else "wrong answer")
        return Score(value, None if value else "wrong answer")


@lru_cache(maxsize=4096)
def _score_answer(address: EntryAddress, answer: str, seconds: float) -> BoundedResult:
    """The scorer's value: here if it only compares texts, else in a process of its own.

    Kept, because the answers of a group are often alike, and a process costs milliseconds.
    """
    dataset, entry = (
        get_dataset(address.dataset, address.config, address.seed),
        generate_entry(address),
    )
    base = import_library("reasoning_gym.dataset").ProceduralDataset
    if type(dataset).score_answer is base.score_answer:
        return BoundedResult(dataset.score_answer(answer, entry))
    return call_with_limit(lambda: score_entry(address.dataset, dataset, answer, entry), seconds)
