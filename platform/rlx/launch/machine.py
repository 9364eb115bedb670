"""What a machine has, found without importing torch: the packages that rlx needs, and CUDA devices,
with those that a run requests."""

import os
import re
import runpy
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlx.errors import EnvironmentFault
from rlx.launch.launcher import open_launcher
from rlx.launch.processes import this_machine
from rlx.spec import ExperimentSpec
from rlx_registry import DeviceRequest

NVIDIA_SMI_TIMEOUT = 20.0
"""Timeout of nvidia-smi in seconds; it is slow while the driver is asleep."""

_GPU = re.compile(r"^GPU (\d+): (.*?) \(UUID: (\S+)\)", re.MULTILINE)
_UUID = re.compile(r"^(?:GPU \d+: | +)(.*?):? *\(UUID: (\S+)\)", re.MULTILINE)
"""Whole devices, and the MIG devices that may be listed below each."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """An installed torch: its version, and those of CUDA or ROCm that it was built for, or None."""

    version: str
    cuda: str | None
    hip: str | None = None


@dataclass(frozen=True, slots=True)
class NvidiaDriver:
    """State of the NVIDIA driver, as nvidia-smi reports it.

    Attributes:
        listing: output of `nvidia-smi -L`, or its error message; None without nvidia-smi.
        cuda: newest CUDA version that the driver supports, such as "12.4"; None if unknown.
    """

    listing: str | None
    works: bool
    cuda: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceShortage:
    """Why there are too few devices: how many there are, what was found, and how to fix it."""

    count: int
    found: str
    help: str


def torch_build() -> TorchBuild | None:
    """Reads the installed torch build from its `version.py`; None if torch is not installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    stated = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return TorchBuild(str(stated["__version__"]), stated.get("cuda"), stated.get("hip"))


def query_nvidia_driver() -> NvidiaDriver | None:
    """Queries the NVIDIA driver through nvidia-smi; None if only torch itself can tell, as in
    containers that have the devices but no nvidia-smi."""
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
            timeout=NVIDIA_SMI_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer in {NVIDIA_SMI_TIMEOUT:.0f} s"
    except OSError as error:
        return 1, str(error.strerror)
    return done.returncode, done.stdout.strip()


def list_visible_devices(listing: str, visible: str | None) -> list[tuple[str, str]]:
    """Token for CUDA_VISIBLE_DEVICES and name of each visible CUDA device, in CUDA's order: the
    index of a whole device, the UUID of a MIG device.

    Args:
        listing: output of `nvidia-smi -L`, which ignores CUDA_VISIBLE_DEVICES.
        visible: value of CUDA_VISIBLE_DEVICES: indices or UUID prefixes; CUDA stops at the first
            invalid one. None if it is unset.
    """
    whole = {number: (number, name) for number, name, _ in _GPU.findall(listing)}
    numbers = {uuid: number for number, _, uuid in _GPU.findall(listing)}
    if visible is None:
        return list(whole.values())
    devices: list[tuple[str, str]] = []
    for token in (part.strip() for part in visible.split(",")):
        found = whole.get(token)
        if token.startswith(("GPU-", "MIG-")):
            named = ((u, n) for n, u in _UUID.findall(listing) if u.startswith(token))
            found = next(((numbers.get(u, u), n) for u, n in named), None)
        if found is None:
            break
        devices.append(found)
    return devices


def diagnose_devices(
    build: TorchBuild, driver: NvidiaDriver | None, visible: str | None, wanted: int
) -> DeviceShortage | None:
    """Explains why torch would not find `wanted` CUDA devices; None if it would, or if unknown.

    Args:
        driver: the NVIDIA driver; None if it cannot be queried.
        visible: value of CUDA_VISIBLE_DEVICES; None if it is unset.
    """
    if build.hip is not None or (build.cuda is not None and driver is None):
        return None
    listing = driver.listing if driver else None
    said = "not found" if listing is None else (listing or "no output").splitlines()[0]
    need = f"torch {build.version} (built for CUDA {build.cuda})"
    if build.cuda is None or driver is None:
        found = f"torch {build.version} (built without CUDA); nvidia-smi: {said}"
        return DeviceShortage(0, found, "install a torch built with CUDA, at the same version")
    if listing is None:
        advice = "install NVIDIA's driver, or start the container with GPU access"
        return DeviceShortage(0, f"{need}, but no NVIDIA driver: nvidia-smi {said}", advice)
    if not driver.works:
        advice = "load or update NVIDIA's driver until `nvidia-smi` works"
        return DeviceShortage(0, f"{need}, but nvidia-smi failed: {said}", advice)
    if driver.cuda is not None and int(driver.cuda.split(".")[0]) < int(build.cuda.split(".")[0]):
        found = f"{need}, but the NVIDIA driver supports at most CUDA {driver.cuda}"
        advice = "update NVIDIA's driver, or install a torch built for an older CUDA"
        return DeviceShortage(0, found, advice)
    everything = [name for _, name in list_visible_devices(listing, None)]
    count = len(list_visible_devices(listing, visible))
    if count >= wanted:
        return None
    kinds = (f"{number} × {name}" for name, number in Counter(everything).items())
    found = ", ".join(kinds) or "no device"
    if len(everything) > count:
        found += f", but CUDA_VISIBLE_DEVICES={visible!r} shows {count} of them"
        advice = "unset CUDA_VISIBLE_DEVICES, or list the devices to use"
        return DeviceShortage(count, found, advice)
    return DeviceShortage(count, found, "ask for no more ranks than there are devices")


DEVICES = "RLX_DEVICES"
"""Environment variable that lists this machine's devices, such as "cuda:0,cuda:1" or "cpu:0,cpu:1".
If it is unset, they are the visible CUDA devices, and runs on the CPU do not queue."""


def build_device_request(spec: ExperimentSpec) -> DeviceRequest | None:
    """The device request that a run makes to the registry; None if it need not queue, as on other
    machines.

    Raises:
        EnvironmentFault: this machine has fewer devices than the run takes.
    """
    runner = spec.runner
    ranks = open_launcher(runner, spec.sampler).count_ranks_here()
    listed: list[str] = []
    if ranks and (configured := os.environ.get(DEVICES)) is not None:
        listed = [name.strip() for name in configured.split(",") if name.strip()]
    elif ranks and (driver := query_nvidia_driver()) is not None and driver.works:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        listed = [
            f"cuda:{token}" for token, _ in list_visible_devices(driver.listing or "", visible)
        ]
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
    """Makes only the CUDA devices that a run got visible to a program."""
    names = [name.removeprefix("cuda:") for name in taken if name.startswith("cuda:")]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}


@dataclass(frozen=True, slots=True)
class Package:
    """One requirement of rlx and its installed version.

    Attributes:
        range: versions that rlx was tested with, such as ">=2.11,<2.14"; "" for any.
        extra: the extra of rlx that requires it; "" for rlx itself.
        installed: installed version; None if it is not installed.
        fits: whether the installed version is in the range; False if it is not installed.
    """

    name: str
    range: str
    extra: str
    installed: str | None
    fits: bool

    @property
    def command(self) -> str:
        """The command that installs a version in the range."""
        return f"pip install '{self.name}{self.range}'"


_DEVELOPMENT = ("dev", "lint", "release", "system", "test")
"""Extras for work on rlx itself."""


@cache
def list_packages() -> Mapping[str, Package]:
    """Requirements of rlx on this platform by name, core before extras; development is left out."""
    found: dict[str, Package] = {}
    for requirement in map(Requirement, requires("rlx") or ()):
        name, extra, marker = canonicalize_name(requirement.name), "", requirement.marker
        if marker is not None and not marker.evaluate({"extra": ""}):
            named = re.search(r"extra == ['\"]([^'\"]+)", str(marker))
            if named is None or not marker.evaluate({"extra": named[1]}):
                continue  # for another platform
            extra = named[1]
        if name != "rlx" and extra not in _DEVELOPMENT:
            installed, range_ = find_version(requirement.name), requirement.specifier
            fits = installed is not None and range_.contains(installed, prereleases=True)
            package = Package(requirement.name, str(range_), extra, installed, fits)
            found.setdefault(name, package)
    return found


def find_version(name: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
