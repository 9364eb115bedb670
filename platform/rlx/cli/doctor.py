"""`rlx doctor`: what this machine has of all that experiments need, and how to get the rest."""

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import metadata
from pathlib import Path
from typing import Literal

import click
from packaging.specifiers import SpecifierSet

from rlx.cli.options import DEFAULT
from rlx.cli.registry import open_registry
from rlx.cli.text import columns
from rlx.discovery import PluginFault, installed, load
from rlx.errors import RlxError
from rlx.run.devices import Lack
from rlx.run.disk import LITTLE, free_bytes, size
from rlx.run.packages import Package, packages
from rlx.run.paths import home, shown, tracking_url
from rlx.run.preflight import cuda_lack, vllm_package

__all__ = ["doctor"]

State = Literal["ok", "broken", "absent"]
SIGNS: dict[State, str] = {"ok": "✓", "broken": "✗", "absent": "–"}
NAMED = ("deepspeed", "transformers", "mlflow", "peft", "math-verify", "datasets")
"""Packages with a line of their own; the others share one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table.

    Attributes:
        found: what there is.
        fix: one thing to do; "" where nothing needs doing.
        required: whether an experiment with the embedded defaults needs it.
    """

    name: str
    state: State
    found: str
    fix: str = ""
    required: bool = False


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> int:
    """Show what this machine has, lacks, and what to do about it.

    The exit code is 0 when an experiment with the embedded defaults can run here, else 4.
    """
    findings = [
        *_system(),
        *_torch(),
        *_packages(),
        *_records(),
        *_plugins(),
    ]
    ready = not any(f.required and f.state == "broken" for f in findings)
    if as_json:
        said = {"ready": ready, "findings": [asdict(f) for f in findings]}
        click.echo(json.dumps(said, indent=2))
    else:
        click.echo(_table(findings))
        ending = "experiments can run here" if ready else "experiments cannot run here: see ✗"
        click.echo(f"\n{ending}")
    return 0 if ready else 4


def _table(findings: Sequence[Finding]) -> str:
    """A line per finding, and below it what to do."""
    rows = [
        row
        for f in findings
        for row in ((SIGNS[f.state], f.name, f.found), ("", "", f"→ {f.fix}"))[: 2 if f.fix else 1]
    ]
    return columns(rows)


def _needed(name: str, sound: bool, found: str, fix: str) -> Finding:
    """A finding on something that no experiment can do without."""
    return Finding(name, "ok" if sound else "broken", found, "" if sound else fix, required=True)


# The machine -----------------------------------------------------------------------------------


def _system() -> Iterator[Finding]:
    wanted = metadata("rlx")["Requires-Python"]
    found = platform.python_version()
    fits = SpecifierSet(wanted).contains(found, prereleases=True)
    yield _needed("Python", fits, found, f"install Python {wanted}")
    posix = os.name == "posix"
    yield _needed("platform", posix, platform.platform(), "run rlx on Linux")
    yield Finding("threads", "ok", f"{os.cpu_count()} cores; {_waiting()}")


def _waiting() -> str:
    """How OpenMP's idle threads wait: spinning ones slow down everything else on the machine."""
    said = os.environ.get("OMP_WAIT_POLICY")
    return f"OMP_WAIT_POLICY {said or 'unset'}; runs set it to PASSIVE"


def _torch() -> Iterator[Finding]:
    torch = packages()["torch"]
    yield _package(torch)
    if torch.installed is None:
        return
    lack = cuda_lack(1)
    if lack is None:
        yield from _gpus(torch)
    else:
        yield _without_gpu(lack)
        yield Finding("NCCL", "absent", "not needed without a GPU")


def _without_gpu(lack: Lack) -> Finding:
    return Finding("CUDA", "absent", f"no device: {lack.found}", f"for a GPU: {lack.help}")


def _gpus(package: Package) -> Iterator[Finding]:
    """What torch itself sees; worth its import only where there is a driver."""
    import torch

    if not torch.cuda.is_available():
        fix = "see what `python -c 'import torch; torch.cuda.init()'` says"
        yield Finding("CUDA", "broken", f"torch {package.installed} finds no device", fix)
        return
    for number in range(torch.cuda.device_count()):
        told = torch.cuda.get_device_properties(number)
        memory = f"{told.total_memory / 1024**3:.0f} GiB"
        found = f"{told.name}, {memory}, capability {told.major}.{told.minor}"
        yield Finding(f"CUDA {number}", "ok", found)
    nccl = torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "none"
    fix = "" if nccl else "install a torch that is built with NCCL"
    yield Finding("NCCL", "ok" if nccl else "broken", version, fix)


# Packages --------------------------------------------------------------------------------------


def _packages() -> Iterator[Finding]:
    known = packages()
    yield from (_package(known[name]) for name in NAMED)
    yield _package(vllm_package())
    others = [p for p in known.values() if not p.extra and p.name not in (*NAMED, "torch")]
    wrong = [p for p in others if not p.fits]
    found = f"{len(others)}, all within the tested ranges"
    if wrong:
        found = ", ".join(f"{p.name} {p.installed or 'missing'}" for p in wrong)
    fix = " ".join(["pip install", *(f"'{p.name}{p.range}'" for p in wrong)])
    yield _needed("other packages", not wrong, found, fix)


def _package(package: Package) -> Finding:
    needed = not package.extra
    if package.installed is None:
        state: State = "broken" if needed else "absent"
        return Finding(package.name, state, "not installed", package.command, needed)
    if package.fits:
        return Finding(package.name, "ok", package.installed, required=needed)
    found = f"{package.installed}, tested with {package.range}"
    return Finding(package.name, "broken", found, package.command, needed)


# Where records go ------------------------------------------------------------------------------


def _records() -> Iterator[Finding]:
    folder = home()
    free = free_bytes(folder)
    writable = _may_be_written(folder)
    found = f"{shown(folder)}, {size(free)} free"
    if not writable:
        found = f"{shown(folder)} cannot be written"
    elif free < LITTLE:
        found += ": little"
    yield _needed(
        "RLX_HOME", writable and free >= LITTLE, found, "set RLX_HOME to a folder with room"
    )
    yield _registry()
    yield _mlflow()
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    how = "offline: HF_HUB_OFFLINE is set, only files on this machine are used"
    yield Finding("model hub", "ok", how if offline else "asked for what is not on this machine")


def _may_be_written(folder: Path) -> bool:
    """Whether `folder` takes files, or could be made; nothing is made to find out."""
    there = next(f for f in (folder, *folder.parents) if f.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _registry() -> Finding:
    url = os.environ.get("RLX_REGISTRY") or DEFAULT
    try:
        path = Path(tracking_url(url).removeprefix("sqlite:///"))
        if tracking_url(url).startswith("sqlite:///") and not path.exists():
            return Finding("registry", "absent", f"none yet at {shown(path)}; submitting makes it")
        with open_registry(url) as registry:
            count = len(registry.runs())
            where = shown(path) if path.exists() else registry.label
    except RlxError as error:
        fix = "move it away, or set RLX_REGISTRY to another"
        return Finding("registry", "broken", str(error), fix, required=True)
    runs = "1 run" if count == 1 else f"{count} runs"
    return Finding("registry", "ok", f"{where}, {runs}", required=True)


def _mlflow() -> Finding:
    path = home() / "mlflow.db"
    if not path.exists():
        return Finding("MLflow store", "absent", f"none yet at {shown(path)}; runs make it")
    return Finding("MLflow store", "ok", f"{shown(path)}, {size(path.stat().st_size)}")


# Plugins ---------------------------------------------------------------------------------------


def _plugins() -> Iterator[Finding]:
    """One line for those that work, and one for each that does not, which harms only its users."""
    offered = installed()
    broken = []
    for found in offered:
        try:
            load(found.kind, found.name)
        except PluginFault as error:
            first = error.diagnostic.message
            fix = f"rlx plugins show {found.name} --traceback"
            broken.append(
                Finding(f"{found.kind} plugin", "broken", first, fix, found.distribution == "rlx")
            )
    yield Finding("plugins", "ok", f"{len(offered) - len(broken)} installed and working")
    yield from broken
