"""The experiment spec: the validated content of one YAML file."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, NamedTuple, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_core import to_json

from rlx.errors import SpecError
from rlx.plugin import PluginSection, Schedule, StrictModel
from rlx.spec.base import KeyPath, set_at_path
from rlx.spec.estimator import CreditSpec, PlacementUse
from rlx.spec.loss import LossSpec
from rlx.spec.model import CLOSED_VOCABULARIES, ModelSpec, PretrainedModelSpec
from rlx.spec.reward import EVERY_TURN, GlobalReward, PluginUse, RewardsSpec, TurnReward
from rlx.spec.rollout import (
    SCHEDULES,
    EnvironmentRolloutSpec,
    EnvironmentUse,
    RolloutSpec,
    SingleRolloutSpec,
)
from rlx.spec.training import (
    SAMPLERS,
    CriticSpec,
    EvaluationSpec,
    MonteCarloSpec,
    OptimizerSpec,
    PhaseSpec,
    ProbeSpec,
    RunnerSpec,
    SamplerSpec,
    TrackingSpec,
    TransformersSamplerSpec,
)

PLUGIN_SECTIONS: Final[Mapping[tuple[str], PluginSection[Any]]] = {
    ("rollout",): SCHEDULES,
    ("sampler",): SAMPLERS,
}
"""Sections whose model is chosen by name, among installed ones."""

_NOT_IN_DIGEST = ("name", "seed", "runner", "tracking")
_LATER_DEFAULTS: Final[tuple[tuple[tuple[str, ...], str, Any], ...]] = (
    (("optimizer",), "mini_batches", 1),
    (("critic",), "mini_batches", 1),
    (("rollout",), "max_prompt_tokens", None),
    (("rollout",), "self_play", None),
    (("rollout",), "examples", []),
    (("rollout",), "tools", []),
    (("rollout",), "live", {"sessions": 64, "episode_deadline": None}),
    (("rollout",), "patience", None),
    (("rollout", "*"), "prefix", ""),
    (("rollout", "levels", "*"), "prefix", ""),
    (("loss",), "expected", None),
    (("loss",), "temperatures", [1.0, 1.05]),
    (("loss",), "ratio_cap", 20.0),
    (("loss",), "sequence_mask", None),
    (("loss",), "covariance", None),
    (("loss", "expected"), "over", "path"),
    (("rewards", "turn", "*"), "over", "path"),
    (("loss", "entropy"), "schedule", "constant"),
    (("model", "warm_start"), "demonstrations", None),
    (("model",), "reference", None),
)
"""Settings that were added when runs had been recorded, and the value that those runs had. With it
they are not part of the digest, so that an experiment keeps its own. "*" is every key."""
_FORMER_SETTINGS: Final[tuple[tuple[tuple[str, ...], str, Any], ...]] = (
    (("evaluation",), "distinct", False),
    (("loss",), "count_empty_rows", None),
    (("probe",), "max_tokens", None),
    (("rollout",), "curriculum", None),
    (("rollout",), "off_policy_steps", 0),
    (("rollout", "max_prompt_tokens"), "on_longer", "drop"),
    (("runner",), "engine", "deepspeed"),
    (("runner", "launcher"), "resources", {}),
    (("sampler",), "adapters", "swap"),
    (("sampler",), "colocate", True),
    (("sampler",), "pool", None),
    (("sampler",), "weight_transfer", "file"),
    (("tracking",), "pictures", False),
    (("tracking",), "pictures", True),
)
"""Settings of earlier versions, and the value that means what rlx does now: a recorded experiment
may have them with this value."""
_FORMER_LIMITS: Final = {"deadline": 5.0, "on_error": "fail"}
"""Defaults of earlier versions that are null now."""
_FORMER_IN_DIGEST: Final = {
    "probe": {"max_tokens": None},
    "rollout": {"off_policy_steps": 0},
    "vllm": {"colocate": True, "weight_transfer": "file"},
}
"""What digests still contain of them, so that an experiment keeps its own: by section, or engine of
the sampler."""
_FIXED_IN_PHASES = (
    "name",
    "seed",
    "from_checkpoint",
    "model",
    "runner",
    "sampler",
    "critic",
    "tracking",
    "evaluation",
    "probe",
    "phases",
)


class EstimatorUse(PluginUse):
    """An advantage estimator by `name`; every other key is an option of the estimator."""

    plugin: str = Field("grpo", alias="name")


class MaskUse(PluginUse):
    """A mask strategy by `strategy`; every other key is an option of the strategy."""

    plugin: str = Field("turn_spans", alias="strategy")


class MisplacedSetting(NamedTuple):
    """An entry of a phase's `set` that cannot be applied, why, and the paths that exist if there
    is a short list of them."""

    path: str
    message: str
    choices: tuple[str, ...] = ()


PLUGIN_USES: Final[Mapping[type[PluginUse], str]] = {
    PluginUse: "task",
    EnvironmentUse: "environment",
    TurnReward: "reward",
    GlobalReward: "reward",
    EstimatorUse: "estimator",
    MaskUse: "mask",
    PlacementUse: "placement",
}
"""Sections that name plugins, and the kind of each; their own keys cannot be options."""


class ExperimentSpec(StrictModel):
    """One experiment. Experiments with equal digests are the same; a run is a digest and a seed.

    Each value is valid on its own; `rlx validate` says whether they fit each other.
    """

    # `model_construct` skips validation of defaults, which would build their schemas at import.
    name: str = Field(min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, lt=2**31)
    from_checkpoint: str | None = None
    """A checkpoint of another run to start from, `RUN@STEP` or `RUN@latest`; null starts from
    `model`."""
    model: ModelSpec
    task: PluginUse
    rollout: RolloutSpec = SingleRolloutSpec.model_construct()
    rewards: RewardsSpec = RewardsSpec.model_construct()
    mask: MaskUse = MaskUse.model_construct()
    credit: CreditSpec = CreditSpec.model_construct()
    estimator: EstimatorUse = EstimatorUse.model_construct()
    critic: CriticSpec | None = None
    monte_carlo: MonteCarloSpec | None = None
    loss: LossSpec = LossSpec.model_construct()
    optimizer: OptimizerSpec = OptimizerSpec.model_construct()
    phases: tuple[PhaseSpec, ...] = Field(min_length=1)
    runner: RunnerSpec = RunnerSpec.model_construct()
    sampler: SamplerSpec = TransformersSamplerSpec.model_construct()
    evaluation: EvaluationSpec = EvaluationSpec.model_construct()
    probe: ProbeSpec | None = None
    tracking: TrackingSpec = TrackingSpec.model_construct()

    @property
    def steps(self) -> int:
        """Total training steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def learns_from_teacher(self) -> bool:
        """Whether the loss draws the policy to another model, on all tokens that learn."""
        return self.model.reference is not None and self.loss.kl is not None

    @property
    def learns_from_rewards(self) -> bool:
        """Whether a row needs a reward to be learned from. It does not if there is a teacher, and
        no reward that is summed."""
        return bool(self.rewards.list_summed_weights()) or not self.learns_from_teacher

    @field_validator("from_checkpoint")
    @classmethod
    def _check_checkpoint_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[^@\s]+@(latest|[0-9]{1,9})", name):
            raise ValueError("a checkpoint is named as RUN@STEP or RUN@latest")
        return name

    def place(self, step: int) -> tuple[int, int]:
        """Returns the index (from 0) of a step's phase and the steps of that phase completed by it;
        raises `ValueError` if there is no such step."""
        done = step
        for number, phase in enumerate(self.phases):
            if done <= phase.steps:
                return number, done
            done -= phase.steps
        raise ValueError(f"there is no step {step}: the experiment has {self.steps} steps")

    def resolve_phase_spec(self, phase: PhaseSpec) -> "ExperimentSpec":
        """Returns the experiment with the phase's `set` applied.

        If the phase selects another schedule, or other levels, the keys that only the previous
        schedule has are dropped, together with the rewards, the entropy bonus and the expected
        score of turns that are not sampled. Raises `ValueError` for a path that does not exist, or
        is fixed for the whole run.
        """
        tree, misplaced = self.apply_phase(phase)
        if misplaced:
            raise ValueError("; ".join(setting.message for setting in misplaced))
        return ExperimentSpec.model_validate_json(to_json(tree), strict=True)

    def apply_phase(self, phase: PhaseSpec) -> tuple[dict[str, Any], list[MisplacedSetting]]:
        """Returns the resolved spec with the phase's values applied, not yet validated, and those
        that cannot be applied."""
        tree = self.dump_resolved()
        misplaced = [
            p for path, value in phase.set.items() if (p := _set_phase_value(tree, path, value))
        ]
        tree["phases"] = [{"name": phase.name, "steps": phase.steps}]
        kind = SCHEDULES.get_model(tree["rollout"])
        if kind is not None and (
            not isinstance(self.rollout, kind)
            or kind.read_turns(tree["rollout"]).keys() != set(self.rollout.turns)
        ):
            self._drop_former_keys(kind, tree, phase.set)
        return tree, misplaced

    def _drop_former_keys(
        self, kind: type[Schedule], tree: dict[str, Any], overrides: Mapping[str, Any]
    ) -> None:
        """Removes settings that do not exist under the schedule `kind`.

        Values that the phase sets itself stay, valid or not: validation reports them.
        """

        def is_untouched(*path: str) -> bool:
            whole = ".".join(path)
            return not any(
                f"{key}.".startswith(f"{whole}.") or f"{whole}.".startswith(f"{key}.")
                for key in overrides
            )

        rollout, former = tree["rollout"], type(self.rollout).model_fields
        for key in former.keys() - kind.model_fields.keys():
            if is_untouched("rollout", key):
                rollout.pop(key, None)
        read = kind.read_turns(rollout)
        for name, reward in self.rewards.turn.items():
            kinds = (reward.turn,) if kind is EnvironmentRolloutSpec else (*read, EVERY_TURN)
            if reward.turn not in kinds and is_untouched("rewards", "turn", name):
                tree["rewards"]["turn"].pop(name, None)
        turns = [turn for turn in read.values() if isinstance(turn, dict)]
        spans = [span for turn in turns for span in turn.get("spans") or ()]
        for key in ("entropy", "expected"):
            term = getattr(self.loss, key)
            if term and term.span and term.span not in spans and is_untouched("loss", key):
                tree["loss"][key] = None

    def dump_resolved(self) -> dict[str, Any]:
        """Returns the whole spec, defaults included, as plain JSON values under their YAML keys."""
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def from_record(cls, recorded: Mapping[str, Any]) -> Self:
        """Reads the resolved spec of a recorded run, which an earlier version may have written;
        raises `SpecError` if it has a setting that this version lacks."""
        tree = deepcopy(dict(recorded))
        for path, name, value in _FORMER_SETTINGS:
            for section in _list_sections(tree, path):
                if name in section and section[name] == value:
                    del section[name]
        for live in _list_sections(tree, ("rollout", "live")):
            if "patience" in live:  # it was a key of `live`
                tree["rollout"]["patience"] = live.pop("patience")
        try:
            return cls.model_validate_json(json.dumps(tree), strict=True)
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"]))
            raise SpecError(
                f"the recorded experiment has {key}, which this version of rlx cannot run"
            ) from None

    @property
    def keeps_finished_checkpoints(self) -> bool:
        """Whether checkpoints outlast the end of the run."""
        keep = self.runner.checkpoint.keep_finished
        return not isinstance(self.model, PretrainedModelSpec) if keep is None else keep

    @property
    def digest(self) -> str:
        """16 hex digits that identify everything that affects results, except the seed."""
        return self.compute_digest()

    def compute_digest(self, without: Iterable[KeyPath] = ()) -> str:
        """Returns the digest of the experiment without the options at some paths."""
        settings = {k: v for k, v in self.dump_resolved().items() if k not in _NOT_IN_DIGEST}
        for path, name, default in _LATER_DEFAULTS:
            for section in _list_sections(settings, path):
                if name in section and section[name] == default:
                    del section[name]
        settings["rollout"] |= _FORMER_IN_DIGEST["rollout"]
        if settings["probe"] is not None:
            settings["probe"] |= _FORMER_IN_DIGEST["probe"]
        settings["sampler"] |= _FORMER_IN_DIGEST.get(self.sampler.engine, {})
        for limit in _list_sections(settings, ("rollout", "max_prompt_tokens")):
            limit["on_longer"] = "drop"
        for environment in _list_sections(settings, ("rollout", "environment")):
            for name, former in _FORMER_LIMITS.items():  # null means them for all that there was
                if environment[name] is None:
                    environment[name] = former
        if settings["model"].get("tokenizer", "") is None:
            # Runs of before had this default; where null chooses another, they could not run.
            settings["model"]["tokenizer"] = CLOSED_VOCABULARIES[0]
        for at in without:
            node: Any = settings
            for step in at[:-1]:
                node = node[step]
            del node[at[-1]]
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _list_sections(tree: Mapping[str, Any], path: Sequence[str]) -> list[Any]:
    """The mappings at a path of keys; "*" is every key, and every item of a list."""
    found: list[Any] = [tree]
    for key in path:
        inner: list[Any] = []
        for one in found:
            if key != "*":
                inner += [one.get(key)] if isinstance(one, dict) else []
            else:
                inner += one.values() if isinstance(one, dict) else one
        found = [one for one in inner if one and isinstance(one, dict | list)]
    return [one for one in found if isinstance(one, dict)]


def _set_phase_value(tree: dict[str, Any], path: str, value: Any) -> MisplacedSetting | None:
    """Sets one of a phase's values in the resolved tree; returns it if that is impossible."""
    head, *rest = path.split(".")
    if head in _FIXED_IN_PHASES:
        return MisplacedSetting(path, f"{path!r} cannot differ between phases")
    if head not in ExperimentSpec.model_fields or not all(rest):
        names = (key for key in ExperimentSpec.model_fields if key not in _FIXED_IN_PHASES)
        near = tuple(".".join((name, *rest)) for name in names)
        return MisplacedSetting(path, f"there is no {path!r}", near)
    try:
        set_at_path(tree, path, value)
    except ValueError as error:
        return MisplacedSetting(path, str(error))
    return None
