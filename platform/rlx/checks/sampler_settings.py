"""Settings of a sampler that its engine cannot honor."""

from collections.abc import Iterator

from rlx.spec import ExperimentSpec, VllmSamplerSpec
from rlx.spec.reading import Diagnostic, build_error

__all__ = ["check_engine_settings"]


def check_engine_settings(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields settings that the engine would silently change, or cannot honor on the CPU."""
    sampler = spec.sampler
    if spec.runner.device == "cpu" and sampler.needs_gpu:
        yield build_error(
            ("sampler", "engine"),
            f"sampler.engine is {sampler.engine}, which needs a GPU",
            "choose another engine",
            against=("runner", "device"),
        )
    engine = "vLLM" if isinstance(sampler, VllmSamplerSpec) else sampler.engine
    for level in spec.rollout.list_levels():
        temperature = level.turn.temperature
        if temperature < sampler.min_temperature:
            yield build_error(
                ("rollout", *level.at, "temperature"),
                f"{level.key}.temperature is {temperature:g}, but {engine} allows none "
                f"below {sampler.min_temperature:g}",
                "for greedy decoding, use top_k: 1",
                against=("sampler", "engine"),
            )
