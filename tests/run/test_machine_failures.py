"""What is missing on a machine, told from plain facts, and failures that a machine causes."""

import errno
import os
from pathlib import Path

import pytest
import torch
from rows import each_row

from rlx.errors import EnvironmentFault, RegistryError, is_out_of_memory
from rlx.launch.failures import (
    convert_to_rlx_error,
    describe_error,
    is_disk_full,
)
from rlx.launch.machine import (
    NvidiaDriver as Nvidia,
)
from rlx.launch.machine import TorchBuild, diagnose_devices, list_visible_devices, torch_build
from rlx.sampler.draw import require_context_room
from rlx.spec import TurnSpec
from rlx_registry import DatabaseUnwritableError, SchemaError

CPU = TorchBuild("2.13.0+cpu", None)
CUDA = TorchBuild("2.13.0", "12.8")
TWO = "GPU 0: NVIDIA H200 (UUID: GPU-aa11)\nGPU 1: NVIDIA H200 (UUID: GPU-bb22)\n"
PARTS = """GPU 0: NVIDIA H200 (UUID: GPU-aa11)
  MIG 1g.18gb     Device  0: (UUID: MIG-cc33)
  MIG 2g.35gb     Device  1: (UUID: MIG-dd44)
"""


@each_row(
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


@each_row(
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


@each_row(
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
    assert [name for _, name in list_visible_devices(listing, visible)] == names


def test_the_installed_torch_is_read():
    build = torch_build()
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda)


def caused(error, by):
    error.__cause__ = by
    return error


def full(path=None):
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def test_a_sampler_without_memory_is_told_to_decode_fewer_rows(monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("rlx.sampler.draw.max", fail, raising=False)
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


@each_row(
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
    assert is_out_of_memory(error)
    assert str(convert_to_rlx_error(error)).startswith("the GPU ran out of memory while it comput")


@each_row(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: out of resource: shared memory"),
        ValueError("CUDA error: out of memory"),
    ],
)
def test_another_error_of_a_gpu_is_no_lack_of_memory(error):
    assert not is_out_of_memory(error)


@each_row(
    ("error", "code", "words"),
    [
        (full("/nowhere/deep/file"), 4, "disk full: /nowhere/deep has"),
        (full(), 4, "disk full while writing output"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 4, "disk full"),
        (caused(RuntimeError("cannot save"), full()), 4, "disk full"),
        (OSError(errno.EDQUOT, "x", "/q/f"), 4, "disk quota exceeded in /q"),
        (OSError(errno.EDQUOT, "x"), 4, "disk quota exceeded in "),
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
        (RegistryError("gone"), 5, "gone"),
        (EnvironmentFault("no GPU"), 4, "no GPU"),
    ],
)
def test_failures_of_the_machine_are_told_from_bugs(error, code, words):
    told = convert_to_rlx_error(error)
    assert told.exit_code == code
    assert words in str(told) == describe_error(error)
    assert is_disk_full(error) == ("disk full" in str(told) or "quota" in str(told))


@each_row(
    "error",
    [ValueError("x"), PermissionError(errno.EPERM, "not yours"), FileNotFoundError(2, "x", "y")],
)
def test_a_bug_is_no_fault_of_the_machine(error):
    assert convert_to_rlx_error(error) is None
    assert describe_error(error).startswith(type(error).__name__)
