"""The task `verifiers`: the rows of a taskset."""

import json
import random
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field

from rlx.plugin import Demonstration, Plugin, Problem, Split
from rlx_gyms.remote import RemoteFault
from rlx_gyms.verifiers.process import TasksetSource, get_process

__all__ = ["VerifiersTask"]

_TIMEOUT = 30.0


class VerifiersTask(Plugin):
    """Rows of a taskset of verifiers, which an interpreter with verifiers loads and scores.

    A hash of the prompt decides whether a row is for training or for testing. The environment is
    `verifiers`.
    """

    demonstrates: ClassVar[bool] = False

    taskset: str = Field(min_length=1)
    """Name of an installed package, or a folder with a package."""
    python: str = Field(min_length=1)
    """Interpreter that has verifiers: `/path/to/venv/bin/python`."""
    config: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the taskset."""
    size: int = Field(10_000, ge=2)
    """How many rows are read; tasksets may have no end."""
    held_out: int = Field(5, ge=2)
    """One in `held_out` prompts is held out for testing."""

    def check(self) -> None:
        """Checks that the taskset can be loaded and has rows of both splits.

        Raises:
            ValueError: it cannot.
        """
        try:
            for split in ("train", "test"):
                _list_rows(self._source, self.held_out, split)
        except RemoteFault as fault:
            raise ValueError(str(fault)) from None

    @property
    def _source(self) -> TasksetSource:
        config = json.dumps(dict(self.config), sort_keys=True)
        return TasksetSource(self.python, self.taskset, config, self.size)

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index` of a split; the same for the same arguments.

        Raises:
            RemoteFault: the taskset cannot be loaded.
            ValueError: no row is for this split.
        """
        rows = _list_rows(self._source, self.held_out, split)
        number = random.Random(f"verifiers/{seed}/{split}/{index}").choice(rows)
        prompt, system = _read_row(self._source, number)
        return Problem(
            id=f"verifiers/{self.taskset}/{number}",
            prompt=prompt,
            system=system,
            fields={"data_source": self.taskset, "index": number, **asdict(self._source)},
        )

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Raises NotImplementedError: tasksets hold no answers in a common field."""
        raise NotImplementedError("tasksets of verifiers have no answers to show")


@lru_cache(maxsize=16)
def _list_rows(source: TasksetSource, held_out: int, split: Split) -> tuple[int, ...]:
    rows = tuple(
        number
        for number in range(get_process(source).count())
        if (zlib.crc32(_read_row(source, number)[0].encode()) % held_out == 0) == (split == "test")
    )
    if not rows:
        raise ValueError(f"none of the rows of {source.taskset} falls into the split {split!r}")
    return rows


@lru_cache(maxsize=100_000)
def _read_row(source: TasksetSource, index: int) -> tuple[str, str]:
    row = get_process(source).request("row", _TIMEOUT, index=index)
    return str(row["prompt"]), str(row["system"])
