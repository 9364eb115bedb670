"""Which devices of this machine a run takes, one per rank, so that several runs take turns."""

import os
from collections.abc import Sequence

from rlx.errors import EnvironmentFault
from rlx.launch.devices import list_device_tokens, query_nvidia_driver
from rlx.launch.launchers import ranks_here
from rlx.launch.processes import this_machine
from rlx.spec import ExperimentSpec, VllmSamplerSpec
from rlx_registry import DeviceRequest

__all__ = ["DEVICES", "build_cuda_environment", "build_device_request", "gpus_here"]

DEVICES = "RLX_DEVICES"
"""Variable that lists the machine's devices, such as "cuda:0,cuda:1" or "cpu:0,cpu:1". Unset, they
are the CUDA devices that a program would see, and runs on the CPU take none."""


def gpus_here(spec: ExperimentSpec) -> int:
    """GPUs that a run takes on the supervisor's machine, if it takes any; 0 where Slurm chooses it.

    Raises:
        EnvironmentFault: there is a hostfile, and it is refused.
    """
    apart = isinstance(spec.sampler, VllmSamplerSpec) and not spec.sampler.colocate
    return ranks_here(spec.runner) * (2 if apart else 1)


def build_device_request(spec: ExperimentSpec) -> DeviceRequest | None:
    """What a run asks the registry for before it starts; None where it need not take turns.

    Devices of other machines are not looked after here: Slurm does that for its own.

    Raises:
        EnvironmentFault: this machine has fewer devices than the run takes.
    """
    runner, count = spec.runner, gpus_here(spec)
    listed = _list_devices() if count else []
    on_cuda = runner.device != "cpu" and any(name.startswith("cuda:") for name in listed)
    kind = "cuda:" if on_cuda or runner.device == "cuda" else "cpu:"
    names = tuple(name for name in listed if name.startswith(kind))
    if not names:
        return None  # ranks say themselves which device they lack
    if len(names) < count:
        raise EnvironmentFault(
            f"the experiment has {ranks_here(runner)} ranks, which take {count} devices, and this "
            f"machine has {len(names)}: "
            f"{', '.join(names)}"
        )
    return DeviceRequest(this_machine(), names, count)


def build_cuda_environment(taken: Sequence[str]) -> dict[str, str]:
    """The variables that show a program the CUDA devices it was given, and no other."""
    names = [name.removeprefix("cuda:") for name in taken if name.startswith("cuda:")]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}


def _list_devices() -> list[str]:
    said = os.environ.get(DEVICES)
    if said is not None:
        return [name.strip() for name in said.split(",") if name.strip()]
    told = query_nvidia_driver()
    if told is None or not told.works:
        return []
    return [
        f"cuda:{t}"
        for t in list_device_tokens(told.listing or "", os.environ.get("CUDA_VISIBLE_DEVICES"))
    ]
