"""Entries of reasoning-gym's datasets, addressed so that a worker can generate them again.

An entry's metadata need not survive JSON (tuples, keys that are numbers), and scorers read it. So a
problem records where its entry comes from, and its scorer generates the entry again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from rlx_gyms.libraries import import_library

__all__ = ["CHUNK", "EntryAddress", "generate_entry", "get_dataset", "list_datasets"]

CHUNK = 256
"""Size of the datasets that entries are drawn from. Some generate all their entries at once."""

_RESERVED = ("seed", "size")


@dataclass(frozen=True, slots=True)
class EntryAddress:
    """Where an entry comes from.

    Attributes:
        dataset: name of the dataset.
        config: its options, as JSON with sorted keys.
        seed: seed of the dataset.
        item: position in the dataset, below `CHUNK`.
    """

    dataset: str
    config: str
    seed: int
    item: int

    @classmethod
    def from_fields(cls, record: Mapping[str, Any]) -> "EntryAddress":
        """Reads the address that a problem records.

        Raises:
            ValueError: it records none.
        """
        try:
            return cls(**record["entry"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                "the problem holds no entry of reasoning-gym: its task must be reasoning_gym"
            ) from error

    def to_record(self) -> dict[str, Any]:
        """The address as plain JSON."""
        return asdict(self)


def list_datasets() -> tuple[str, ...]:
    """The names of all datasets but `composite`, whose place the task `mixture` takes.

    Raises:
        ImportError: reasoning-gym is missing.
    """
    factory = import_library("reasoning_gym.factory")
    import_library("reasoning_gym")
    return tuple(sorted(set(factory.DATASETS) - {"composite"}))


@lru_cache(maxsize=64)
def get_dataset(name: str, config: str, seed: int) -> Any:
    """A dataset of `CHUNK` entries.

    Raises:
        ImportError: reasoning-gym is missing.
        ValueError: there is no such dataset, or it refuses its options.
    """
    names = list_datasets()
    if name not in names:
        hint = _suggest_name(name, names, f"there are {len(names)}, such as chain_sum")
        raise ValueError(f"reasoning-gym has no dataset {name!r}; {hint}")
    dataset_class, config_class = import_library("reasoning_gym.factory").DATASETS[name]
    options = json.loads(config)
    known = [f.name for f in fields(config_class) if f.name not in _RESERVED]
    for option in options:
        if option in _RESERVED:
            raise ValueError(f"config.{option}: rlx derives it from the experiment's seed")
        if option not in known:
            hint = _suggest_name(option, known, f"it has {', '.join(known) or 'none'}")
            raise ValueError(f"config: {name} has no option {option!r}; {hint}")
    try:
        made = config_class(**options, seed=seed, size=CHUNK)
        if hasattr(made, "validate"):
            made.validate()
        dataset = dataset_class(config=made)
        dataset[0]  # some options are only refused where an entry is made
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"config: {name} refuses its options: {error}") from error
    return dataset


@lru_cache(maxsize=256)
def generate_entry(address: EntryAddress) -> Mapping[str, Any]:
    """The entry at an address: `question`, `answer` (None if the dataset stores none), `metadata`.

    Raises:
        ImportError, ValueError: as `get_dataset`.
    """
    entry: Mapping[str, Any] = get_dataset(address.dataset, address.config, address.seed)[
        address.item
    ]
    return entry


def _suggest_name(word: str, choices: Sequence[str], otherwise: str) -> str:
    """The help for a name that is not one of `choices`: the closest, else `otherwise`."""
    near = get_close_matches(word, choices, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise
