"""What can be asked of a trained model or a run, as frozen objects. Imports no torch."""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlx.errors import SpecError
from rlx.launch import get_registry_url
from rlx.text import escape_unprintable


class OpenedRun(Protocol):
    """A run with its registry, such as `rlx.Run`."""

    @property
    def id(self) -> str: ...
    @property
    def registry(self) -> str: ...


def locate_target(target: str | OpenedRun, registry: str | None) -> tuple[str, str]:
    """Returns the name of a target, and the URL of the registry to look in."""
    if isinstance(target, str):
        return target, get_registry_url(registry)
    if hasattr(target, "id") and hasattr(target, "registry"):
        return target.id, target.registry
    raise SpecError("the target is a run, its name, or a model's folder or name, as text")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What to evaluate, and on which problems.

    Attributes:
        target: a run, or the folder or hub name of a model.
        experiment: file of a model's experiment; None for a run, which has its own.
        step: evaluate the run's checkpoint of this step; None evaluates its exported model.
        suite: YAML file with held-out sets; None takes the experiment's own.
        problems: problems per set; None takes the suite's number, as all that follow.
        samples: answers per problem.
        greedy: use greedy decoding.
        seed: seed of problems and sampling.
        overrides: `key=value` of the sections `runner` and `sampler`.
    """

    target: str | OpenedRun
    experiment: Path | None = None
    step: int | None = None
    suite: Path | None = None
    problems: int | None = None
    samples: int | None = None
    greedy: bool = False
    seed: int | None = None
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("problems", "samples"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SpecError(f"{name} is {value}: it must be at least 1")
        if self.step is not None and self.experiment is not None:
            raise SpecError("--at is for a run, which has its own experiment: drop --spec")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What to probe, and how; None takes the setting of the experiment's `probe:` section.

    Attributes:
        target: a run, or the folder or hub name of a model.
        experiment: file of a model's experiment; None for a run, which has its own.
        problems: number of held-out problems.
        samples: continuations per cut point.
        schemes: how to alter the reasoning; empty takes the experiment's.
        seed: seed of problems and sampling.
        overrides: `key=value`; of a run only of the sections `probe`, `runner`, `sampler`, `seed`.
    """

    target: str | OpenedRun
    experiment: Path | None = None
    problems: int | None = None
    samples: int | None = None
    schemes: tuple[str, ...] = ()
    seed: int | None = None
    overrides: tuple[str, ...] = ()

    def list_overrides(self) -> tuple[str, ...]:
        """Returns the overrides and the settings as `key=value`; the settings win."""
        settings = {
            "probe.problems": self.problems,
            "probe.samples": self.samples,
            "probe.schemes": list(self.schemes) or None,
            "seed": self.seed,
        }
        named = [f"{key}={json.dumps(v)}" for key, v in settings.items() if v is not None]
        return (*self.overrides, *named)


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoreRequest:
    """Which rollouts to rescore, and by which rules.

    Attributes:
        run: the run, or its id, its number or `latest`.
        experiment: file of the experiment whose rules are taken; None takes the run's own.
        overrides: `key=value` of the sections that are rules.
        steps: the steps; empty takes all that are stored.
    """

    run: str | OpenedRun
    experiment: Path | None = None
    overrides: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()


def check_sections(overrides: Iterable[str], free: Collection[str], reason: str) -> None:
    """Raises SpecError, which ends with `reason`, if an override changes a section other than
    `free`."""
    fixed = sorted({o for o in overrides if o.partition("=")[0].split(".")[0] not in free})
    if fixed:
        raise SpecError(f"--set {escape_unprintable(fixed[0])}: {reason}")
