"""Chooses the devices of this machine that a run requests, so that runs can queue for them."""

import os
from collections.abc import Sequence

from rlx.errors import EnvironmentFault
from rlx.launch.devices import list_device_tokens, query_nvidia_driver
from rlx.launch.launcher import open_launcher
from rlx.launch.processes import this_machine
from rlx.spec import ExperimentSpec
from rlx_registry import DeviceRequest

__all__ = ["DEVICES", "build_cuda_environment", "build_device_request", "gpus_here"]

DEVICES = "RLX_DEVICES"
"""Environment variable that lists this machine's devices, such as "cuda:0,cuda:1" or "cpu:0,cpu:1".
If it is unset, they are the visible CUDA devices, and runs on the CPU do not queue."""


def gpus_here(spec: ExperimentSpec) -> int:
    """Number of GPUs on the supervisor's machine for a run on GPUs; 0 if a job
    system chooses the machine.

    Raises:
        EnvironmentFault: the launcher cannot say so here.
    """
    return open_launcher(spec.runner, spec.sampler).count_ranks_here()


def build_device_request(spec: ExperimentSpec) -> DeviceRequest | None:
    """The device request that a run makes to the registry; None if it need not queue.

    rlx does not manage devices on other machines; Slurm manages those of its nodes.

    Raises:
        EnvironmentFault: this machine has fewer devices than the run takes.
    """
    runner = spec.runner
    ranks = open_launcher(runner, spec.sampler).count_ranks_here()
    listed = _list_devices() if ranks else []
    on_cuda = runner.device != "cpu" and any(name.startswith("cuda:") for name in listed)
    kind = "cuda:" if on_cuda or runner.device == "cuda" else "cpu:"
    names = tuple(name for name in listed if name.startswith(kind))
    if not names:
        return None  # the ranks report a missing device themselves
    if len(names) < ranks:
        raise EnvironmentFault(
            f"the experiment has {ranks} ranks, each with a device of its own, but this machine "
            f"has {len(names)}: {', '.join(names)}"
        )
    return DeviceRequest(this_machine(), names, ranks)


def build_cuda_environment(taken: Sequence[str]) -> dict[str, str]:
    """Environment variables that make only the allocated CUDA devices visible to a program."""
    names = [name.removeprefix("cuda:") for name in taken if name.startswith("cuda:")]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}


def _list_devices() -> list[str]:
    configured = os.environ.get(DEVICES)
    if configured is not None:
        return [name.strip() for name in configured.split(",") if name.strip()]
    driver = query_nvidia_driver()
    if driver is None or not driver.works:
        return []
    return [
        f"cuda:{t}"
        for t in list_device_tokens(driver.listing or "", os.environ.get("CUDA_VISIBLE_DEVICES"))
    ]
