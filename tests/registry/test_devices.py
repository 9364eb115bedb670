"""Devices of a machine: each is held by one run at a time, and never given back by hand."""

import time

import pytest
from many import processes
from submissions import silence, submit

from rlx_registry import DeviceRequest, DevicesBusyError, Registry


def of(count, *names, host="one"):
    return DeviceRequest(host, names or ("gpu:0", "gpu:1"), count)


def start(registry, run_id, devices, expect=("submitted",)):
    started = registry.start(run_id, expect, devices=devices)
    return started.devices


def holders(registry, host=None):
    return {(d.host, d.name): d.run_id for d in registry.devices(host)}


def test_devices_go_to_the_run_that_starts(registry):
    assert start(registry, "1", None) == ()
    assert start(registry, "2", of(1)) == ("gpu:0",)
    assert start(registry, "3", of(1)) == ("gpu:1",)
    assert start(registry, "4", of(2, host="two")) == ("gpu:0", "gpu:1")
    assert holders(registry, "one") == {("one", "gpu:0"): "r-0002", ("one", "gpu:1"): "r-0003"}
    (first, *_) = registry.devices()
    assert (first.host, first.name, first.run_id, first.attempt) == ("one", "gpu:0", "r-0002", 1)
    assert first.at == pytest.approx(time.time(), abs=30)


def test_too_few_devices_name_their_holders_and_change_nothing(registry):
    start(registry, "1", of(1))
    before = registry.run("2"), registry.history("2"), registry.devices()
    with pytest.raises(
        DevicesBusyError, match=r"^one has 1 of 2 devices free: r-0001 holds gpu:0$"
    ):
        registry.start("2", ["submitted"], devices=of(2))
    assert (registry.run("2"), registry.history("2"), registry.devices()) == before
    assert registry.start("2", ["queued"], devices=of(1)) is None
    assert registry.start("2", ["submitted"], devices=of(0)).devices == ()


@pytest.mark.parametrize("end", ["finished", "failed", "stopped", "lost", "queued"])
def test_a_run_that_ends_frees_its_devices_at_once(registry, end):
    start(registry, "1", of(2))
    registry.transition("1", ["running"], end)
    assert registry.devices() == []
    assert start(registry, "2", of(2)) == ("gpu:0", "gpu:1")
    assert set(holders(registry).values()) == {"r-0002"}


def test_a_run_that_starts_again_takes_anew(registry):
    start(registry, "1", of(2))
    assert start(registry, "1", of(1, "gpu:1"), ["running"]) == ("gpu:1",)
    assert [(d.name, d.attempt) for d in registry.devices()] == [("gpu:1", 2)]
    assert start(registry, "2", of(1)) == ("gpu:0",)
    start(registry, "1", None, ["running"])
    assert holders(registry) == {("one", "gpu:0"): "r-0002"}


def test_a_silent_run_loses_its_devices_and_is_told(registry):
    writer = registry.as_writer("1", registry.start("1", ["submitted"], devices=of(1)).attempt)
    silence(registry)
    assert registry.devices() == []
    assert registry.run("1").status == "running"
    assert writer.heartbeat("1")  # nobody wanted them: they are its own again
    assert holders(registry) == {("one", "gpu:0"): "r-0001"}
    silence(registry)
    assert start(registry, "2", of(1)) == ("gpu:0",)
    assert not writer.heartbeat("1")
    lost = registry.run("1")
    assert (lost.status, lost.reason) == ("lost", "no heartbeat; its devices were given to r-0002")
    assert holders(registry) == {("one", "gpu:0"): "r-0002"}


WORKER = """
import os, sys
from rlx_registry import DevicesBusyError, DeviceRequest, Registry
url, folder = sys.argv[1:3]
names = ("gpu:0", "gpu:1", "gpu:2")
with Registry.open(url) as registry:
    begin_together()
    for run in reversed(registry.runs(statuses=["queued"])):
        if not registry.transition(run.id, {"queued"}, "submitted"):
            continue  # another process was faster
        count = 1 + int(run.seed) % 2
        while True:
            try:
                wanted = DeviceRequest("one", names, count)
                started = registry.start(run.id, ["submitted"], devices=wanted)
                break
            except DevicesBusyError:
                pass  # another process has them
        marks = [open(f"{folder}/{name}", "x") for name in started.devices]
        registry.update_run(run.id, step=1)  # others ask for devices meanwhile
        for mark in marks:
            os.unlink(mark.name)
        registry.transition(run.id, ["running"], "finished")
        print(f"{run.id}:{len(started.devices)}")
"""


def test_two_processes_never_have_one_device(url, tmp_path):
    """The one that makes a file for its device would fail where another has it."""
    folder = tmp_path / "devices"
    folder.mkdir()
    with Registry.open(url) as registry:
        for seed in range(40):
            submit(registry, seed=seed, queue=True)
        found = processes(WORKER, [(url, folder)] * 4)
        done = sorted(word for words in found for word in words)
        assert done == [f"r-{seed + 1:04d}:{1 + seed % 2}" for seed in range(40)]
        assert registry.devices() == []
        assert list(folder.iterdir()) == []
