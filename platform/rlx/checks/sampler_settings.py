"""Settings of a sampler that its engine cannot honor."""

from collections.abc import Iterator

from rlx.spec import ExperimentSpec, SamplerPoolSpec, VllmSamplerSpec
from rlx.spec.reading import Diagnostic, build_error
from rlx.trial import load_model_shape

__all__ = ["check_engine_settings"]

ANY_VOCABULARY = 1
"""For the shape of a tiny model, of which only the heads matter here."""


def check_engine_settings(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields settings that the engine would silently change, or cannot honor on the CPU or with
    this model."""
    sampler = spec.sampler
    if spec.runner.device == "cpu" and sampler.needs_gpu:
        key = "engine"
        if isinstance(sampler, VllmSamplerSpec):
            key = "colocate" if not sampler.colocate else "weight_transfer"
        yield build_error(
            ("sampler", key),
            f"sampler.{key} is {str(getattr(sampler, key)).lower()}, which needs a GPU",
            "remove it",
            against=("runner", "device"),
        )
    pool = sampler.pool if isinstance(sampler, VllmSamplerSpec) else None
    if pool is not None:
        yield from _check_pool(spec, pool)
    if spec.rollout.off_policy_steps > 1:
        yield from _check_steps_ahead(spec)
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


def _check_steps_ahead(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields what does not go with weights that change while rollouts are sampled."""
    sampler, rollout = spec.sampler, spec.rollout
    at, ahead = ("rollout", "off_policy_steps"), rollout.off_policy_steps
    states = f"rollout.off_policy_steps is {ahead}: weights arrive while rollouts are sampled"
    one = "set off_policy_steps to 1"
    if not isinstance(sampler, VllmSamplerSpec) or sampler.pool is None:
        yield build_error(
            at,
            f"{states}, which only servers of sampler.pool can",
            f"{one}, or use `sampler: {{engine: vllm, pool: {{servers: 1}}}}`",
            against=("sampler",),
        )
        return
    if sampler.pool.repeatable:
        yield build_error(
            at,
            f"{states}, so that numbers depend on time, but sampler.pool.repeatable is true",
            f"{one}, or drop `repeatable`",
            against=("sampler", "pool", "repeatable"),
        )
    if getattr(spec.model, "lora", None) is not None and sampler.adapters == "swap":
        yield build_error(
            at,
            f"{states}, and vLLM cannot swap an adapter of rows that it is generating",
            f"{one}, or set sampler.adapters to merge",
            against=("sampler", "adapters"),
        )
    if rollout.dynamic_sampling is not None:
        yield build_error(
            at,
            f"rollout.off_policy_steps is {ahead}, but how many problems a step draws under "
            "rollout.dynamic_sampling is known only when it has been sampled",
            f"{one}, or drop `dynamic_sampling`",
            against=("rollout", "dynamic_sampling"),
        )


def _check_pool(spec: ExperimentSpec, pool: SamplerPoolSpec) -> Iterator[Diagnostic]:
    shape = load_model_shape(spec.model, ANY_VOCABULARY) if pool.tensor_parallel > 1 else None
    if shape is not None and shape.heads % pool.tensor_parallel:
        fitting = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - pool.tensor_parallel))
        yield build_error(
            ("sampler", "pool", "tensor_parallel"),
            f"sampler.pool.tensor_parallel is {pool.tensor_parallel}, which does not divide the "
            f"{shape.heads} attention heads of the model",
            f"set it to {nearest}",
            against=("model",),
        )
