"""The samples that an adversarial text is scored in: of the examples, and decoys of them."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlx.plugin import Example, Sample
from rlx.reward import RewardJob
from rlx.spec import TurnReward
from rlx.testing.processes import score_jobs

__all__ = [
    "DEADLINE",
    "get_example_values",
    "list_decoys",
    "list_example_texts",
    "list_sample_groups",
    "place_text",
    "select_examples",
]

DEADLINE: float = TurnReward.model_fields["deadline"].default
_DECOYS = 2
_TEMPLATES = 4


def select_examples(reward: Any) -> list[Example]:
    """The examples with the options of this reward."""
    own = reward.model_dump(by_alias=True)
    return [
        example
        for example in getattr(reward, "examples", ())
        if all(_to_plain(own.get(key)) == _to_plain(v) for key, v in example.options.items())
        and _has_default_options(reward, example)
        and any(value is not None for value in get_example_values(example))
    ]


def _has_default_options(reward: Any, example: Example) -> bool:
    """Whether what the example leaves out is at its default here."""
    fields = type(reward).model_fields
    return all(
        (info.alias or name) in example.options
        or info.is_required()
        or _to_plain(getattr(reward, name))
        == _to_plain(info.get_default(call_default_factory=True))
        for name, info in fields.items()
    )


def _to_plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda v: getattr(v, "__dict__", str(v))))


def get_example_values(example: Example) -> tuple[float | None, ...]:
    return example.value if isinstance(example.value, tuple) else (example.value,)


def _get_samples(example: Example) -> tuple[Sample, ...]:
    return (example.sample,) if isinstance(example.sample, Sample) else example.sample


def list_example_texts(example: Example) -> list[str]:
    return [sample.response for sample in _get_samples(example)]


def list_sample_groups(examples: Sequence[Example]) -> list[tuple[Sample, ...]]:
    """The samples of the examples, each problem once.

    An example whose parent's value earns nothing whatever is said cannot be paid, and is left out.
    """
    least = min(v for e in examples for v in get_example_values(e) if v is not None)
    paying = {
        sample.of
        for e in examples
        for sample, value in zip(_get_samples(e), get_example_values(e), strict=True)
        if value is not None and value > least
    }
    groups: dict[str, tuple[Sample, ...]] = {}
    for example in examples:
        samples = _get_samples(example)
        if samples[0].of in paying or not paying:
            bare = [replace(s, response="", spans=dict.fromkeys(s.spans, "")) for s in samples]
            groups.setdefault(repr(bare), samples)
    return list(groups.values())[:_TEMPLATES]


def list_decoys(
    reward: Any, groups: Sequence[tuple[Sample, ...]], rng: random.Random
) -> list[tuple[Sample, ...]]:
    """Copies of the first problem with other numbers and words, which the reward accepts."""
    samples = groups[0]
    problem = samples[0].problem
    changes = [list(problem), *([key] for key in problem)]
    found = []
    for keys in [keys for keys in changes for _ in range(_DECOYS)]:
        other = {k: _change_value(v, rng) if k in keys else v for k, v in problem.items()}
        if other != problem:
            found.append(tuple(replace(sample, problem=other) for sample in samples))
    outcomes = score_jobs([RewardJob(reward, decoy, DEADLINE) for decoy in found])
    accepted = [d for d, outcome in zip(found, outcomes, strict=True) if outcome.fault is None]
    return accepted[:_DECOYS]


def _change_value(value: Any, rng: random.Random) -> Any:
    """A value of the same form that means something else."""
    if isinstance(value, Mapping):
        return {key: _change_value(part, rng) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_change_value(part, rng) for part in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value + rng.randint(1, 97)
    if isinstance(value, float):
        return value + rng.randint(1, 97) / 8
    if isinstance(value, str):
        return "".join(_change_character(character, rng) for character in value)
    return value


def _change_character(character: str, rng: random.Random) -> str:
    if character.isdigit():
        return rng.choice("123456789".replace(character, ""))
    if character.isalpha():
        return rng.choice("bcdfghjklmnpqrstvwxyz".replace(character.lower(), ""))
    return character


def place_text(samples: tuple[Sample, ...], text: str) -> tuple[Sample, ...]:
    """The samples with another first response; a span holds its tag's content, or the whole."""
    first = samples[0]
    spans = {name: _read_span(text, name) for name in first.spans}
    return (replace(first, response=text, spans=spans), *samples[1:])


def _read_span(text: str, name: str) -> str:
    _, opening, rest = text.rpartition(f"<{name}>")
    return rest.partition(f"</{name}>")[0] if opening else text
