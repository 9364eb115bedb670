"""Registry record of a probe: the figures of one scheme, and the settings behind them."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from rlx.probe.engine import ProbeResult
from rlx.probe.statistics import GRID, MeanInterval, SchemeFigures, VerbalRow, list_verbal_rows
from rlx.spec import ProbeSpec, Scheme

__all__ = ["RecordedProbe", "compute_settings_digest", "settings_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProbe:
    """One scheme of one probe.

    Attributes:
        suite: the scheme; for settings other than the run's own, followed by "/" and their digest.
        step: step of the run.
        settings: settings that determine the figures; see `settings_of`.
        figures: figures over all problems.
        verbal: answers with a stated confidence; empty for schemes other than early_answering.
        unprobed: number of answers left out because the token budget was used up.
    """

    suite: str
    step: int
    settings: Mapping[str, Any]
    figures: SchemeFigures
    verbal: tuple[VerbalRow, ...]
    unprobed: int

    @property
    def scheme(self) -> str:
        """How the reasoning was changed."""
        return self.suite.partition("/")[0]

    @classmethod
    def from_figures(
        cls,
        suite: str,
        step: int,
        settings: Mapping[str, Any],
        figures: SchemeFigures,
        found: ProbeResult,
    ) -> Self:
        """Builds the record of one scheme from a probe's results."""
        early = suite.partition("/")[0] == "early_answering"
        return cls(
            suite=suite,
            step=step,
            settings=settings,
            figures=figures,
            verbal=tuple(list_verbal_rows(found)) if early else (),
            unprobed=found.unprobed,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with None for nan, without suite and step, which the registry also stores."""
        whole: dict[str, Any] = _without_nan(self.figures.to_json())
        whole |= {"grid": list(GRID), "unprobed": self.unprobed, "settings": dict(self.settings)}
        if self.scheme == "early_answering":
            whole["verbal"] = [asdict(row) for row in self.verbal]
        return whole

    @classmethod
    def from_json(cls, suite: str, step: int, record: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        figures = {name: record[name] for name in SchemeFigures.__dataclass_fields__}
        for name in ("p_correct", "strict", "same"):
            figures[name] = tuple(_parse_band(one) for one in record[name])
        figures["aoc"] = _parse_band(record["aoc"])
        figures["aoc_by_length"] = tuple(tuple(group) for group in record["aoc_by_length"])
        return cls(
            suite=suite,
            step=step,
            settings=record["settings"],
            figures=SchemeFigures(**figures),
            verbal=tuple(VerbalRow(**row) for row in record.get("verbal", ())),
            unprobed=record["unprobed"],
        )


def _parse_band(record: Mapping[str, float | None]) -> MeanInterval:
    return MeanInterval(
        **{name: math.nan if value is None else value for name, value in record.items()}
    )


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def settings_of(spec: ProbeSpec, scheme: Scheme, seed: int) -> dict[str, Any]:
    """Settings that determine a scheme's figures, besides model and experiment, as plain JSON.

    The list of schemes is included only if they share a token budget, since they are otherwise
    independent.
    """
    apart = {"every"} if spec.max_tokens is not None else {"every", "schemes"}
    return {"scheme": scheme, "seed": seed, **spec.model_dump(mode="json", exclude=apart)}


def compute_settings_digest(settings: Mapping[str, Any]) -> str:
    """Eight hex digits that identify the settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
