"""The task `reasoning_gym`: problems of one of its datasets."""

import json
import random
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rlx.plugin import Demonstration, Problem, Split
from rlx_gyms.libraries import NeedsLibrary, is_installed
from rlx_gyms.reasoning.entries import CHUNK, EntryAddress, generate_entry, get_dataset

__all__ = ["ReasoningGymTask"]

_ATTEMPTS = 1000


class ReasoningGymTask(NeedsLibrary):
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
            get_dataset(self.dataset, self._config_text, 0)
        return self

    @property
    def _config_text(self) -> str:
        return json.dumps(dict(self.config), sort_keys=True)

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index` of a split; the same for the same arguments.

        Raises:
            ImportError: reasoning-gym is missing.
            ValueError: the dataset has no question for this split.
        """
        for attempt in range(_ATTEMPTS):
            address = self._locate_candidate(split, index, seed, attempt)
            entry = generate_entry(address)
            if self._is_test(entry["question"]) == (split == "test"):
                return self._build_problem(address, entry)
        raise ValueError(
            f"{self.dataset} with these options has too few questions: none of {_ATTEMPTS} is for "
            f"the split {split!r}"
        )

    @property
    def demonstrates(self) -> bool:
        """Whether the dataset stores its answers, which `warm_start` needs."""
        if not is_installed("reasoning_gym"):  # otherwise `check` says so
            return True
        return (
            generate_entry(EntryAddress(self.dataset, self._config_text, 0, 0))["answer"]
            is not None
        )

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns an answer between answer tags: the dataset's own, or that of another problem.

        With `confidences`, a second turn states one of 0.0, 0.1, …, 1.0 at random.

        Raises:
            NotImplementedError: the dataset stores no answers.
        """
        if not self.demonstrates:
            raise NotImplementedError(f"{self.dataset} of reasoning-gym stores no answers")
        rng = random.Random(f"reasoning_gym/{seed}/{problem.id}")
        answer = problem.fields["answer"]
        if rng.random() >= self.correct:
            other = self.problem("train", rng.randrange(4 * CHUNK), seed)
            answer = other.fields["answer"]
        stated = f"<confidence>{rng.randrange(11) / 10}</confidence>"
        turns = (f"<answer>{answer}</answer>", stated)
        return Demonstration(turns if self.confidences else turns[:1])

    def _locate_candidate(self, split: Split, index: int, seed: int, attempt: int) -> EntryAddress:
        """Where the candidates for a problem come from: no two problems share one.

        A dataset of `CHUNK` entries holds 16 candidates for each of 16 problems, because some
        datasets take long to make.
        """
        side = 16
        chunk, place = divmod(index, CHUNK // side)
        batch, turn = divmod(attempt, side)
        purpose = f"reasoning_gym/{self.dataset}/{seed}/{split}/{chunk}/{batch}"
        drawn = random.Random(purpose).getrandbits(31)
        return EntryAddress(self.dataset, self._config_text, drawn, place * side + turn)

    def _is_test(self, question: str) -> bool:
        return zlib.crc32(question.encode()) % self.held_out == 0

    def _build_problem(self, address: EntryAddress, entry: Mapping[str, Any]) -> Problem:
        question = str(entry["question"])
        return Problem(
            id=f"reasoning_gym/{self.dataset}/{zlib.crc32(question.encode()):08x}/"
            f"{address.seed}-{address.item}",
            prompt=question,
            fields={
                "data_source": self.dataset,
                "entry": address.to_record(),
                "answer": entry["answer"],
            },
        )
