"""What experiments need of a machine: what this one has, what it lacks, and how to mend it."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet

from rlx.checks.machine import find_cuda_lack, vllm_package
from rlx.discovery import PluginFault, list_installed_plugins, load_plugin
from rlx.errors import RlxError
from rlx.home import format_path, get_rlx_home, tracking_url
from rlx.launch import (
    LITTLE,
    DeviceShortage,
    Package,
    format_disk_space,
    free_bytes,
    list_packages,
    open_registry,
)
from rlx.spec.reading import Diagnostic, build_error, build_warning

__all__ = ["MachinePart", "inspect_machine"]

State = Literal["ok", "broken", "absent"]
NAMED = ("deepspeed", "transformers", "mlflow", "peft", "math-verify", "datasets")
"""Packages that have their own line; the others share one."""


@dataclass(frozen=True, slots=True)
class MachinePart:
    """Something that experiments use on a machine.

    Attributes:
        found: what was found.
        fix: how to mend or add it; "" where nothing needs to be done.
        required: whether an experiment with the built-in defaults needs it.
    """

    name: str
    state: State
    found: str
    fix: str = ""
    required: bool = False

    @property
    def finding(self) -> Diagnostic | None:
        """The error, or the warning if few experiments need the part, where it is broken."""
        if self.state != "broken":
            return None
        message = f"{self.name}: {self.found}"
        if not self.required:
            return build_warning((), message, self.fix)
        return build_error((), message, self.fix, kind="machine")


def inspect_machine(registry_url: str) -> Iterator[MachinePart]:
    """Yields what experiments use on this machine, without importing torch where there is no GPU.

    Args:
        registry_url: URL of the registry to look for.
    """
    yield from _check_system()
    yield from _check_torch()
    yield from _check_packages()
    yield from _check_record_stores(registry_url)
    yield from _check_installed_plugins()


def _build_required_part(name: str, sound: bool, found: str, fix: str) -> MachinePart:
    """Builds a part that every experiment needs."""
    return MachinePart(
        name, "ok" if sound else "broken", found, "" if sound else fix, required=True
    )


# The machine -----------------------------------------------------------------------------------


def _check_system() -> Iterator[MachinePart]:
    wanted = metadata("rlx")["Requires-Python"]
    found = platform.python_version()
    fits = SpecifierSet(wanted).contains(found, prereleases=True)
    yield _build_required_part("Python", fits, found, f"install Python {wanted}")
    posix = os.name == "posix"
    yield _build_required_part("platform", posix, platform.platform(), "run rlx on Linux")
    yield MachinePart("threads", "ok", f"{os.cpu_count()} cores; {_describe_wait_policy()}")


def _describe_wait_policy() -> str:
    """Describes how idle OpenMP threads wait; spinning threads slow down other processes."""
    policy = os.environ.get("OMP_WAIT_POLICY")
    return f"OMP_WAIT_POLICY {policy or 'unset'}; runs set it to PASSIVE"


def _check_torch() -> Iterator[MachinePart]:
    torch = list_packages()["torch"]
    yield _check_one_package(torch)
    if torch.installed is None:
        return
    lack = find_cuda_lack(1)
    if lack is None:
        yield from _check_gpus(torch)
    else:
        yield _describe_no_gpu(lack)
        yield MachinePart("NCCL", "absent", "not needed without a GPU")


def _describe_no_gpu(lack: DeviceShortage) -> MachinePart:
    return MachinePart("CUDA", "absent", f"no device: {lack.found}", f"for a GPU: {lack.help}")


def _check_gpus(package: Package) -> Iterator[MachinePart]:
    """Checks the GPUs that torch sees; torch is imported only where there is a driver."""
    import torch

    if not torch.cuda.is_available():
        fix = "for the cause, run `python -c 'import torch; torch.cuda.init()'`"
        yield MachinePart("CUDA", "broken", f"torch {package.installed} finds no device", fix)
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        memory = f"{properties.total_memory / 1024**3:.0f} GiB"
        found = f"{properties.name}, {memory}, capability {properties.major}.{properties.minor}"
        yield MachinePart(f"CUDA {number}", "ok", found)
    nccl = torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "none"
    fix = "" if nccl else "install a torch build with NCCL"
    yield MachinePart("NCCL", "ok" if nccl else "broken", version, fix)


# Packages --------------------------------------------------------------------------------------


def _check_packages() -> Iterator[MachinePart]:
    known = list_packages()
    yield from (_check_one_package(known[name]) for name in NAMED)
    yield _check_one_package(vllm_package())
    others = [p for p in known.values() if not p.extra and p.name not in (*NAMED, "torch")]
    wrong = [p for p in others if not p.fits]
    found = f"{len(others)}, all within the tested ranges"
    if wrong:
        found = ", ".join(f"{p.name} {p.installed or 'missing'}" for p in wrong)
    fix = " ".join(["pip install", *(f"'{p.name}{p.range}'" for p in wrong)])
    yield _build_required_part("other packages", not wrong, found, fix)


def _check_one_package(package: Package) -> MachinePart:
    needed = not package.extra
    if package.installed is None:
        state: State = "broken" if needed else "absent"
        return MachinePart(package.name, state, "not installed", package.command, needed)
    if package.fits:
        return MachinePart(package.name, "ok", package.installed, required=needed)
    found = f"{package.installed}, tested with {package.range}"
    return MachinePart(package.name, "broken", found, package.command, needed)


# Storage ------------------------------------------------------------------------------


def _check_record_stores(registry_url: str) -> Iterator[MachinePart]:
    folder = get_rlx_home()
    free = free_bytes(folder)
    writable = _is_writable(folder)
    found = f"{format_path(folder)}, {format_disk_space(free)} free"
    if not writable:
        found = f"{format_path(folder)} cannot be written"
    elif free < LITTLE:
        found += ": little"
    yield _build_required_part(
        "RLX_HOME", writable and free >= LITTLE, found, "set RLX_HOME to a folder with room"
    )
    yield _check_registry(registry_url)
    yield _check_mlflow_store()
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    how = "offline: HF_HUB_OFFLINE is set, only files on this machine are used"
    yield MachinePart(
        "model hub", "ok", how if offline else "used for files that are not on this machine"
    )


def _is_writable(folder: Path) -> bool:
    """Returns whether `folder` is writable or could be created, without creating it."""
    there = next(f for f in (folder, *folder.parents) if f.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _check_registry(url: str) -> MachinePart:
    try:
        path = Path(tracking_url(url).removeprefix("sqlite:///"))
        if tracking_url(url).startswith("sqlite:///") and not path.exists():
            return MachinePart(
                "registry", "absent", f"none yet at {format_path(path)}; `rlx submit` creates it"
            )
        with open_registry(url) as registry:
            count = len(registry.runs())
            where = format_path(path) if path.exists() else registry.label
    except RlxError as error:
        fix = "move it away, or set RLX_REGISTRY to another"
        return MachinePart("registry", "broken", str(error), fix, required=True)
    runs = "1 run" if count == 1 else f"{count} runs"
    return MachinePart("registry", "ok", f"{where}, {runs}", required=True)


def _check_mlflow_store() -> MachinePart:
    path = get_rlx_home() / "mlflow.db"
    if not path.exists():
        return MachinePart(
            "MLflow store", "absent", f"none yet at {format_path(path)}; runs create it"
        )
    return MachinePart(
        "MLflow store", "ok", f"{format_path(path)}, {format_disk_space(path.stat().st_size)}"
    )


# Plugins ---------------------------------------------------------------------------------------


def _check_installed_plugins() -> Iterator[MachinePart]:
    """Yields one part for all working plugins, and one for each broken plugin.

    Only the plugins that rlx ships are required; others affect only the experiments that use them.
    """
    offered = list_installed_plugins()
    broken = []
    for found in offered:
        try:
            load_plugin(found.kind, found.name)
        except PluginFault as error:
            first = error.diagnostic.message
            fix = f"rlx plugins show {found.name} --traceback"
            broken.append(
                MachinePart(
                    f"{found.kind} plugin", "broken", first, fix, found.distribution == "rlx"
                )
            )
    yield MachinePart("plugins", "ok", f"{len(offered) - len(broken)} installed and working")
    yield from broken
