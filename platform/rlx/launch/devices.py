"""Which CUDA devices a run could use here, told without importing torch.

Facts are read by `torch_build` and `driver`; `devices` and `diagnose` are functions of them alone.
"""

import ast
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = [
    "DeviceShortage",
    "NvidiaDriver",
    "TorchBuild",
    "diagnose_devices",
    "list_device_names",
    "list_device_tokens",
    "query_nvidia_driver",
    "torch_build",
]

PATIENCE = 20.0
"""Seconds that nvidia-smi may take; it is slow where a driver sleeps."""

_GPU = re.compile(r"^GPU (\d+): (.*?) \(UUID: (\S+)\)", re.MULTILINE)
_UUID = re.compile(r"^(?:GPU \d+: | +)(.*?):? *\(UUID: (\S+)\)", re.MULTILINE)
"""Whole devices, and the parts (MIG) that may be listed below each."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """An installed torch.

    Attributes:
        version: such as "2.13.0+cpu".
        cuda: version of CUDA that it was built with, such as "12.8"; None without.
        hip: as `cuda`, for ROCm.
    """

    version: str
    cuda: str | None
    hip: str | None = None


@dataclass(frozen=True, slots=True)
class NvidiaDriver:
    """What NVIDIA's driver says.

    Attributes:
        listing: what `nvidia-smi -L` printed, or its complaint; None where there is no nvidia-smi.
        works: whether it could say anything.
        cuda: the newest CUDA that the driver runs, such as "12.4"; None where it does not say.
    """

    listing: str | None
    works: bool
    cuda: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceShortage:
    """Why there are not the devices that are wanted: what was found, and what to do."""

    count: int
    found: str
    help: str


def torch_build() -> TorchBuild | None:
    """The installed torch, from the file that states its version; None without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    stated: dict[str, Any] = {}
    for node in ast.parse((Path(spec.origin).parent / "version.py").read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Constant(value)):
                stated[name] = value
            case ast.AnnAssign(target=ast.Name(name), value=ast.Constant(value)):
                stated[name] = value
    return TorchBuild(str(stated["__version__"]), stated.get("cuda"), stated.get("hip"))


def query_nvidia_driver() -> NvidiaDriver | None:
    """NVIDIA's driver as nvidia-smi tells of it; None where only torch itself can tell.

    That is so in containers that are given the devices without nvidia-smi.
    """
    if shutil.which("nvidia-smi") is None:
        return None if Path("/dev/nvidiactl").exists() else NvidiaDriver(None, works=False)
    code, listing = _run_command("nvidia-smi", "-L")
    if code != 0:
        return NvidiaDriver(listing, works=False)
    newest = re.search(r"CUDA Version\s*:\s*([0-9.]+)", _run_command("nvidia-smi", "--version")[1])
    return NvidiaDriver(listing, works=True, cuda=newest[1] if newest else None)


def _run_command(*command: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer in {PATIENCE:.0f} s"
    except OSError as error:
        return 1, str(error.strerror)
    return done.returncode, done.stdout.strip()


def list_device_names(listing: str, visible: str | None) -> list[str]:
    """Names of the devices that CUDA would show to a program, in its order.

    Args:
        listing, visible: as for `tokens`.
    """
    return [name for _, name in _list_visible_devices(listing, visible)]


def list_device_tokens(listing: str, visible: str | None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each device that CUDA would show to a program.

    A whole device is called by its number, whatever `visible` calls it; a part of one by its UUID.

    Args:
        listing: what `nvidia-smi -L` printed, which knows nothing of CUDA_VISIBLE_DEVICES.
        visible: CUDA_VISIBLE_DEVICES: indices or the beginnings of UUIDs; CUDA stops at the first
            that is none. None where it is not set.
    """
    return [token for token, _ in _list_visible_devices(listing, visible)]


def _list_visible_devices(listing: str, visible: str | None) -> list[tuple[str, str]]:
    """Token and name of each device that CUDA would show."""
    whole = {number: (number, name) for number, name, _ in _GPU.findall(listing)}
    numbers = {uuid: number for number, _, uuid in _GPU.findall(listing)}
    if visible is None:
        return list(whole.values())
    shown: list[tuple[str, str]] = []
    for token in (part.strip() for part in visible.split(",")):
        found = whole.get(token)
        if token.startswith(("GPU-", "MIG-")):
            named = ((u, n) for n, u in _UUID.findall(listing) if u.startswith(token))
            found = next(((numbers.get(u, u), n) for u, n in named), None)
        if found is None:
            break
        shown.append(found)
    return shown


def diagnose_devices(
    build: TorchBuild, told: NvidiaDriver | None, visible: str | None, wanted: int
) -> DeviceShortage | None:
    """Says why torch would not find `wanted` CUDA devices; None where it would, or nobody knows.

    Args:
        build: the installed torch.
        told: what the driver says.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        wanted: one device per rank.
    """
    if build.hip is not None:
        return None
    if build.cuda is None:
        smi = "not found" if told is None or told.listing is None else _get_first_line(told.listing)
        return DeviceShortage(
            0,
            f"torch {build.version} (built without CUDA); nvidia-smi: {smi}",
            "install a torch that is built with CUDA, at the same version",
        )
    if told is None:
        return None
    if lack := _driver_lack(build, told):
        return lack
    everything = list_device_names(told.listing or "", None)
    seen = list_device_names(told.listing or "", visible)
    if len(seen) >= wanted:
        return None
    if len(everything) > len(seen):
        return DeviceShortage(
            len(seen),
            f"{_format_device_counts(everything)}, but CUDA_VISIBLE_DEVICES={visible!r} shows "
            f"{len(seen)} of them",
            "unset CUDA_VISIBLE_DEVICES, or list the devices to use",
        )
    return DeviceShortage(
        len(seen), _format_device_counts(seen), "ask for no more ranks than there are devices"
    )


def _driver_lack(build: TorchBuild, told: NvidiaDriver) -> DeviceShortage | None:
    need = f"torch {build.version} (built for CUDA {build.cuda})"
    if told.listing is None:
        return DeviceShortage(
            0,
            f"{need}, but no NVIDIA driver: nvidia-smi is not installed",
            "install NVIDIA's driver, or start the container with its GPUs",
        )
    if not told.works:
        return DeviceShortage(
            0,
            f"{need}, but the NVIDIA driver does not answer: {_get_first_line(told.listing)}",
            "load or update NVIDIA's driver until `nvidia-smi` works",
        )
    if told.cuda is not None and _parse_major_version(told.cuda) < _parse_major_version(
        str(build.cuda)
    ):
        return DeviceShortage(
            0,
            f"{need}, but the NVIDIA driver runs CUDA {told.cuda} at most",
            "update NVIDIA's driver, or install a torch built for an older CUDA",
        )
    return None


def _parse_major_version(number: str) -> int:
    return int(number.split(".")[0])


def _get_first_line(text: str) -> str:
    return text.splitlines()[0] if text else "it printed nothing"


def _format_device_counts(names: Sequence[str]) -> str:
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "no device"
