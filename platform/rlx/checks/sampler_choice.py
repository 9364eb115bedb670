"""Chooses the engine of `sampler: {engine: auto}`, once, when an experiment is read.

What follows sees only the engine: digest, checks and plan of the experiment, the run's record, and
whoever resumes or rescores it. Nothing here imports torch or vLLM.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rlx.launch import (
    diagnose_devices,
    list_device_names,
    list_packages,
    query_nvidia_driver,
    torch_build,
)
from rlx.spec import (
    SAMPLERS,
    AutoSamplerSpec,
    ExperimentSpec,
    PretrainedModelSpec,
    RunnerSpec,
    VllmSamplerSpec,
)
from rlx.spec.reading import LoadedSpec
from rlx.trial import (
    FILLED,
    GPUS,
    SamplingWork,
    estimate_sampling_bytes,
    estimate_sampling_seconds,
    list_expected_levels,
    load_model_shape,
)

__all__ = ["EngineChoice", "SamplingCase", "choose_engine", "resolve_sampler"]

MARGIN = 1.2
"""How much longer than vLLM the transformers sampler may be expected to take, since only it resumes
a run with the same tokens, and since vLLM's times are not measured."""
ASSUMED = "H100"
"""The GPU of a run that asks for one on a machine without."""
ROOM = {"transformers": 0.92, "vllm": 0.95}
"""Share of a GPU's memory that may be planned: fragments and the driver need some too, and vLLM
keeps to its share."""
TINY = 512
"""Tokens of a tiny model's vocabulary, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingCase:
    """What the choice of an engine depends on.

    Attributes:
        gpu: one of `GPUS`, or another GPU's name; "" for the CPU.
        assumed: whether the GPU is assumed, since none is seen here.
        works: steps of each phase, and what is sampled in each of them; empty if the model's
            dimensions or the GPU are unknown.
        cache_bytes: memory that vLLM has for keys and values.
        lacks: why an engine cannot be used, by its name.
    """

    gpu: str
    assumed: bool = False
    works: tuple[tuple[int, SamplingWork], ...] = ()
    cache_bytes: float = 0.0
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and the reason for it."""

    engine: str
    reason: str

    def __str__(self) -> str:
        return f"{self.engine}, because {self.reason}"


def choose_engine(case: SamplingCase) -> EngineChoice:
    """Takes vLLM if `MARGIN` · (seconds with vLLM) < (seconds with transformers), per step on
    average over the run, or if only vLLM can be used; see `rlx.trial.duration` for the seconds."""
    if not case.gpu:
        return EngineChoice("transformers", "the run is on the CPU")
    if not case.works:
        what = "the model's dimensions are" if case.gpu in GPUS else f"the speed of a {case.gpu} is"
        return EngineChoice("transformers", f"{what} not known, so no times can be compared")
    own, theirs = (_average_seconds(case, engine) for engine in ("transformers", "vllm"))
    faster = theirs * MARGIN < own
    wanted, other = ("vllm", "transformers") if faster else ("transformers", "vllm")
    figures = _describe_figures(case, own, theirs)
    if wanted not in case.lacks:
        slight = "; only transformers resumes with the same tokens"
        return EngineChoice(wanted, figures + slight * (not faster and theirs < own))
    if other not in case.lacks:
        return EngineChoice(other, f"{case.lacks[wanted]} ({figures})")
    both = " and ".join(case.lacks[engine] for engine in (wanted, other))
    return EngineChoice("transformers", f"neither engine can be used: {both}")


def _average_seconds(case: SamplingCase, engine: str) -> float:
    """Expected seconds of sampling in a step."""
    steps = sum(count for count, _ in case.works)
    cache = {"cache_bytes": case.cache_bytes} if engine == "vllm" else {}
    seconds = (
        count * estimate_sampling_seconds(work, GPUS[case.gpu], engine, **cache)
        for count, work in case.works
    )
    return sum(seconds) / steps


def _describe_figures(case: SamplingCase, own: float, theirs: float) -> str:
    """Describes the expected seconds, how contexts are shared, and what is uncertain."""
    sharing = max(work.sharing for _, work in case.works)
    assumed = " (no GPU is seen here)" if case.assumed else ""
    return (
        f"a step's sampling is expected to take {_round_seconds(own)} s with transformers and "
        f"{_round_seconds(theirs)} s with vllm on a rank's {case.gpu}{assumed}, within a factor of "
        f"two; {sharing:.1f} rows share a token of context"
    )


def _round_seconds(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


# What is known of the experiment and of this machine ---------------------------------------------


def resolve_sampler(read: LoadedSpec) -> LoadedSpec:
    """Replaces `sampler: {engine: auto}` by the settings of the engine that is chosen for this
    machine, and says why in `choices`; any other experiment is returned unchanged."""
    auto = read.spec.sampler
    if not isinstance(auto, AutoSamplerSpec):
        return read
    choice = choose_engine(_describe_case(read.spec))
    chosen = SAMPLERS.validate_section(
        {**auto.model_dump(exclude_unset=True), "engine": choice.engine}
    )
    spec = read.spec.model_copy(update={"sampler": chosen})
    resolved = LoadedSpec.from_document(read.path, read.document, spec)
    origins = {**resolved.origins, "sampler.engine": f"{read.origins['sampler.engine']} (auto)"}
    return replace(resolved, origins=origins, choices={**read.choices, "sampler": str(choice)})


def _describe_case(spec: ExperimentSpec) -> SamplingCase:
    gpu, assumed = _find_gpu(spec.runner)
    is_tiny = not isinstance(spec.model, PretrainedModelSpec)
    shape = load_model_shape(spec.model, TINY if is_tiny else None) if gpu in GPUS else None
    if shape is None:
        return SamplingCase(gpu=gpu, assumed=assumed)
    phases = [(one.steps, spec.resolve_phase_spec(one)) for one in spec.phases]
    works = tuple(
        (
            steps,
            SamplingWork(
                shape=shape,
                levels=list_expected_levels(phase.rollout),
                ranks=spec.runner.ranks,
                max_rows=spec.sampler.max_rows,
                filled=FILLED,
                width=2 if spec.runner.dtype == "bfloat16" else 4,
            ),
        )
        for steps, phase in phases
    )
    share = VllmSamplerSpec().gpu_memory_utilization * GPUS[gpu].memory
    crowded = {} if assumed else dict(_find_crowding(spec, [work for _, work in works], gpu))
    if share <= works[0][1].weights:
        crowded["vllm"] = "vLLM's share of the GPU's memory cannot hold the weights"
    return SamplingCase(
        gpu=gpu,
        assumed=assumed,
        works=works,
        cache_bytes=share - works[0][1].weights,
        lacks={**crowded, **dict(_list_lacks(spec))},
    )


def _find_gpu(runner: RunnerSpec) -> tuple[str, bool]:
    """The GPU that a run would use, by its name in `GPUS` if it is there, and whether it is
    assumed; "" for the CPU."""
    build, visible = torch_build(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if runner.device == "cpu" or build is None:
        return "", False
    driver = query_nvidia_driver()
    if runner.device == "auto" and diagnose_devices(build, driver, visible, 1) is not None:
        return "", False
    if build.hip is not None:
        return "GPU of AMD", False
    listing = driver.listing or "" if driver is not None and driver.works else ""
    names = list_device_names(listing, visible)
    if not names:  # it may be there: without nvidia-smi, only torch knows
        return ASSUMED, True
    return max(filter(partial(_is_named, names[0]), GPUS), key=len, default=names[0]), False


def _is_named(name: str, gpu: str) -> bool:
    """Whether `nvidia-smi` calls this GPU so: a GH200 is no H200, a laptop's has less memory."""
    return bool(re.search(rf"(?<!\w){gpu}(?!\w)", name)) and "Laptop" not in name


def _list_lacks(spec: ExperimentSpec) -> Iterator[tuple[str, str]]:
    """Yields why vLLM cannot sample this experiment here."""
    vllm = list_packages().get("vllm")
    if vllm is None or vllm.installed is None:
        yield "vllm", "vLLM is not installed: pip install 'rlx[vllm]'"
    elif not vllm.fits:
        yield "vllm", f"vLLM {vllm.installed} is installed, and rlx needs vllm{vllm.range}"
    rollouts = (spec.resolve_phase_spec(phase).rollout for phase in spec.phases)
    coolest = min(one.turn.temperature for rollout in rollouts for one in rollout.list_levels())
    if coolest < VllmSamplerSpec.min_temperature:
        yield "vllm", f"vLLM allows no temperature below {VllmSamplerSpec.min_temperature:g}"


def _find_crowding(
    spec: ExperimentSpec, works: Sequence[SamplingWork], gpu: str
) -> Iterator[tuple[str, str]]:
    """Yields the engines with which a rank's plan of memory does not fit its GPU."""
    uses_kl = spec.credit.use_kl_in_reward or spec.loss.kl is not None
    needs = {"values"} if spec.critic else set()
    needs |= {"reference_logprobs"} if uses_kl else set()
    memory = GPUS[gpu].memory
    for engine, room in ROOM.items():
        sampler = SAMPLERS.validate_section({"engine": engine, "max_rows": spec.sampler.max_rows})
        there = spec.model_copy(
            update={
                "sampler": sampler,
                "runner": spec.runner.model_copy(update={"device": "cuda"}),
            }
        )
        most = max(estimate_sampling_bytes(there, work.shape, work.levels, needs) for work in works)
        if engine == "vllm":  # its weights and its cache are its share
            most += int(VllmSamplerSpec().gpu_memory_utilization * memory) - works[0].weights
        if most > room * memory:
            held = f"{most / 2**30:.0f} GiB while {engine} samples"
            yield engine, f"a rank is planned to hold {held}, and the GPU has {memory / 2**30:.0f}"
