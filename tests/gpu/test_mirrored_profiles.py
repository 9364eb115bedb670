"""Every GPU profile, shrunk, from its start over a checkpoint to its exported model, on a mirrored
GPU with DeepSpeed's own engine.

`tests/mirrored_gpu.py`, `mirrored_deepspeed.py` and `mirrored_vllm.py` say what that shows and what
not; `small_profiles.py` says what is shrunk.
"""

import math
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from mirrored_deepspeed import train_on_mirror
from mirrored_gpu import CUDA, mirror_gpu
from mirrored_vllm import mirror_vllm
from safetensors.torch import load_file

from rlx.home import RunFolder
from rlx.learner import Ranks, choice
from rlx.learner.forms import CachedForm, GroupedForm, PlainForm
from rlx.reward import open_job_pool
from rlx.run.loop import run_experiment
from rlx.run.stop_request import RunStopped, StopRequest
from rlx.spec import RunnerSpec

sys.path.insert(0, str(Path(__file__).parent))
from small_profiles import (
    PROFILES,
    SHAPE,
    group_profiles,
    read_small_profile,
    write_small_files,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")

GROUPS = group_profiles()
MORE = ("model.lora={rank: 2}", "rollout.off_policy_steps=1")
"""Settings that no profile has, in a further run."""
RESUMED = {
    "rlcr_0.5b": MORE,
    "kg_gae_3b": ("critic.lead_steps=1",),
    "sources/tinyzero_3b": (),
}
"""Runs that are stopped after a step and resumed: rollouts in flight, a critic, ZeRO 3."""


class Recorder:
    """What a run records."""

    def __init__(self):
        self.steps, self.events = [], []

    def step(self, number, figures, *_, **__):
        self.steps.append(figures)

    def event(self, kind, message, **_):
        self.events.append(f"{kind}: {message}")

    def list_checkpoint_digests(self):
        return {}

    def __getattr__(self, _):
        return lambda *_, **__: None


class StopAtOnce(StopRequest):
    """Stops a run after its first step, which leaves a checkpoint."""

    def __init__(self):
        super().__init__()
        self.requested = True


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_small_files(folder)
    return folder


@pytest.fixture(scope="module")
def scoring():
    with open_job_pool(RunnerSpec()) as pool:
        yield pool


@pytest.fixture(autouse=True)
def smaller(monkeypatch, scoring, tmp_path):
    """Few tokens have large logits, and all runs share the processes that score."""
    monkeypatch.setenv("RLX_HOME", str(tmp_path))
    monkeypatch.setattr("rlx.run.loop.open_job_pool", lambda _: nullcontext(scoring))
    monkeypatch.setattr(choice, "WHOLE_LOGITS", choice.WHOLE_LOGITS * SHAPE.vocabulary // 151_936)
    # Flex attention compiles kernels: there is no compiler for a mirrored GPU.
    forms = (GroupedForm(), CachedForm(), PlainForm())
    monkeypatch.setitem(choice.FORMS, "cuda", forms)


def make_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    return folder


def run(spec, folder, stop):
    """One attempt of a run: what happened on the device, and what was recorded."""
    recorder = Recorder()
    with mirror_gpu() as gpu, train_on_mirror(), mirror_vllm():
        try:
            run_experiment(spec, folder, Ranks(0, 1, CUDA), recorder, stop)
        except RunStopped:
            assert stop.requested
    assert not gpu.capturing and not any(gpu.streams.values())
    return gpu, recorder


def check_figures(figures, spec, gpu):
    """A step has learned, and the sampler has its weights."""
    assert figures["train/grad_norm"] > 0 and math.isfinite(figures["train/grad_norm"])
    if spec.critic is not None:
        assert math.isfinite(figures["critic/grad_norm"])
    if spec.sampler.engine == "vllm":
        assert figures["sampler/drift"] < 0.1
    else:
        assert gpu.graphs and gpu.replays


def test_every_profile_is_run():
    assert sorted(name for names in GROUPS.values() for name in names) == PROFILES


@pytest.mark.parametrize("name", [name for name in GROUPS if RESUMED.get(name, MORE) is MORE])
def test_a_profile_runs_whole(name, files, tmp_path):
    spec, folder = read_small_profile(name, files), make_folder(tmp_path)
    gpu, recorder = run(spec, folder, StopRequest())
    (figures,) = recorder.steps
    check_figures(figures, spec, gpu)
    exported = load_file(folder.model / "model.safetensors")
    assert all(weight.isfinite().all() for weight in exported.values())


@pytest.mark.parametrize("name", RESUMED)
def test_a_profile_resumes_from_its_checkpoint(name, files, tmp_path):
    spec = read_small_profile(name, files, "phases.0.steps=2", *RESUMED[name])
    folder = make_folder(tmp_path)
    run(spec, folder, StopAtOnce())
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_000001"]
    gpu, recorder = run(spec, folder, StopRequest())
    assert any(event.startswith("resume") for event in recorder.events), recorder.events
    (figures,) = recorder.steps
    check_figures(figures, spec, gpu)
    assert (folder.model / "model.safetensors").exists()
