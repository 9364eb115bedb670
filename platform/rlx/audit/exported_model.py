"""Probe an exported model in the current process, without a learner or ranks."""

from collections.abc import Callable

import torch

from rlx.errors import EnvironmentFault, SpecError
from rlx.model import build_policy
from rlx.probe import ProbeResult
from rlx.recipe import build_recipe
from rlx.reward import RewardPool
from rlx.run import Progress, build_probe_context, probe_problems
from rlx.sampler import open_sampler, require_engine
from rlx.spec import ExperimentSpec, PretrainedModelSpec, RunnerSpec

__all__ = ["probe_exported", "resolve_single_device"]


def probe_exported(
    spec: ExperimentSpec, model: str, show: Callable[[Progress], None]
) -> ProbeResult:
    """Probes a model in the same way as a run of `spec` does.

    Args:
        spec: has a `probe:` section; of its model section only the chat template is used.
        model: folder in the Hugging Face layout, or name on the hub.
        show: called with the progress.

    Raises:
        SpecError: the experiment has no probe, or the model does not fit the experiment.
        EnvironmentFault: model files or the device are missing.
    """
    if spec.probe is None:
        raise SpecError("the experiment has no `probe:` section")
    runner = spec.runner
    require_engine(spec.sampler)
    device = resolve_single_device(runner)
    torch.set_num_threads(runner.threads)
    recipe = build_recipe(spec)
    chat = isinstance(spec.model, PretrainedModelSpec) and spec.model.chat_template
    policy = build_policy(PretrainedModelSpec(path=model, chat_template=chat), seed=0)
    with (
        RewardPool(workers=runner.reward_workers, memory_mb=runner.reward_memory_mb) as pool,
        open_sampler(policy, spec.sampler, runner, device) as sampler,
    ):
        context = build_probe_context(recipe, policy, sampler, pool)
        return probe_problems(spec.probe, context, spec.seed, None, show)


def resolve_single_device(runner: RunnerSpec) -> torch.device:
    """The device of a single process without ranks.

    Raises:
        EnvironmentFault: `runner.device` requires a GPU, and there is none.
    """
    there = torch.cuda.is_available()
    if runner.device == "cuda" and not there:
        raise EnvironmentFault(
            "runner.device is 'cuda', but torch finds no CUDA device; run `rlx check` for the "
            "cause, or use the CPU with `--set runner.device=cpu`"
        )
    return torch.device("cuda" if there and runner.device != "cpu" else "cpu")
