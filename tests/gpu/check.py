"""Checks rlx on a machine with a GPU and no network, part by part; one JSON comes out.

    make gpu-check [WHEELS=folder] [ARGS="--only sampler --again"]

Every part is a process of its own with at most 8 minutes. Results are written after each part, and
parts that have passed on the same sources are not run again, so an interrupted check goes on where
it stopped. `tests/gpu/wheels.py` says which packages must be brought along.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LONGEST = 480.0
"""Seconds that one part may take."""
ROOMS = {
    "sampler": ("sampler",),
    "learner": ("learner",),
    "others": ("credit", "kl", "loss", "mask", "step", "batch", "reward", "rollout"),
}
"""Rooms whose tests are run; those that touch devices read RLX_TEST_DEVICE."""

Result = dict[str, Any]


def machine(device: str) -> Result:
    """What is here: the GPU, its driver, and what kernels are compiled with."""
    code = (
        "import json, torch, sys; from importlib.metadata import version as v; "
        "g = torch.cuda; here = g.is_available(); print(json.dumps({"
        "'python': sys.version.split()[0], 'cuda': torch.version.cuda, "
        "'device': g.get_device_name() if here else 'cpu', 'devices': g.device_count(), "
        "'memory_gb': g.mem_get_info()[1] / 1e9 if here else None, 'bf16': here and "
        "g.is_bf16_supported(), 'packages': {n: v(n) for n in ('torch', 'transformers', "
        "'deepspeed', 'pydantic', 'sqlalchemy', 'rlx')}}))"
    )
    found: Result = json.loads(_run([sys.executable, "-c", code]).splitlines()[-1])
    if device == "cuda" and found["device"] == "cpu":
        raise AssertionError("torch finds no CUDA device")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    found["compiler"] = shutil.which("gcc") or shutil.which("cc")
    found["python_headers"] = headers.exists()
    found["free_gb"] = {
        folder: shutil.disk_usage(folder).free / 1e9
        for folder in ("/dev/shm", tempfile.gettempdir())
        if Path(folder).exists()
    }
    if device == "cuda" and not (found["compiler"] and found["python_headers"]):
        raise AssertionError(
            f"Triton needs a C compiler (gcc) and Python's headers ({headers}): install both, "
            "such as gcc and python3-dev"
        )
    return found


def promises(device: str, which: str) -> Result:
    """The tests of rooms that compute; sampler and learner on this device."""
    rooms = [str(ROOT / "tests" / room) for room in ROOMS[which]]
    # Other versions of the libraries are here than in CI, and with them other warnings.
    arguments = ["-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    said = _run([sys.executable, "-m", "pytest", *arguments, *rooms], device=device)
    return {"summary": said.splitlines()[-1]}


def precision(device: str) -> Result:
    """Sampler against learner, in float32 and bfloat16."""
    said = _run([sys.executable, str(HERE / "precision.py"), device], device=device)
    found: Result = json.loads(said.splitlines()[-1])
    return found


def speed(device: str) -> Result:
    """Updates in every form of packed trees, and sampling: tokens per second, memory, use."""
    said = _run([sys.executable, str(HERE / "speed.py"), device], device=device)
    found: Result = json.loads(said.splitlines()[-1])
    return found


def kernels(device: str, what: str) -> Result:
    """What only a GPU shows of the learner or the sampler, figure by figure."""
    command = [sys.executable, str(HERE / "gpu_kernels.py"), what, device]
    figures = _run(command, device=device).splitlines()
    return {"figures": [json.loads(line) for line in figures if line.startswith("{")]}


def _stages(device: str, name: str, *overrides: str) -> Result:
    """Three steps of a profile with random weights: the peak of each stage beside the plan's."""
    said = _run([sys.executable, str(HERE / "stages.py"), name, device, *overrides], device=device)
    found: Result = json.loads(said.splitlines()[-1])
    return found


def vllm(device: str) -> Result:
    """The same with vLLM: how far it is from the learner, and whether both fit one GPU."""
    if importlib.util.find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed here"}
    return _stages(device, "rlcr_1.5b", "sampler={engine: vllm}")


def two_gpus(device: str) -> Result:
    """Two ranks with NCCL."""
    lack = _find_gpu_lack(device, 2)
    return {"skipped": lack} if lack else _stages(device, "rlcr_1.5b", "runner.ranks=2")


def vllm_pool(device: str) -> Result:
    """A rank beside a pool of one server, split over two GPUs."""
    if importlib.util.find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed here"}
    lack = _find_gpu_lack(device, 3)
    pool = "sampler={engine: vllm, pool: {servers: 1, tensor_parallel: 2}}"
    return {"skipped": lack} if lack else _stages(device, "rlcr_1.5b", pool)


def _find_gpu_lack(device: str, wanted: int) -> str | None:
    count = json.loads(
        _run([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"])
    )
    return f"GPUs: {count} of {wanted}" if device == "cuda" and count < wanted else None


def _experiment(name: str, device: str) -> Result:
    """An experiment from its start to its end."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"RLX_HOME": home}
        rlx = [sys.executable, "-c", "import sys; from rlx.cli import main; sys.exit(main())"]
        spec = str(ROOT / "experiments" / f"{name}.yaml")
        options = {"runner.device": device, "tracking.mlflow": "null"}
        overrides = [part for key, value in options.items() for part in ("--set", f"{key}={value}")]
        began = time.monotonic()
        _run([*rlx, "submit", spec, *overrides], device=device, **environment)
        seconds = time.monotonic() - began
        said = json.loads(_run([*rlx, "status", "latest", "--json"], **environment))
    evaluation, suites = said["evaluation"], said["suites"]
    accuracy = {
        suite: {label: figures["accuracy"] for label, figures in labels.items()}
        for suite, labels in suites.items()
    }
    told = {label: evaluation[label] for label in ("before", "after")}
    return {"wall_s": seconds, **told, "accuracy": accuracy}


PARTS: dict[str, Callable[[str], Result]] = {
    "machine": machine,
    "learner": partial(kernels, what="learner"),
    "sampler": partial(kernels, what="sampler"),
    "precision": precision,
    "rlcr_1.5b": partial(_stages, name="rlcr_1.5b"),
    "countdown_1.5b": partial(_stages, name="countdown_1.5b"),
    "rlcr_coupled_1.5b": partial(_stages, name="rlcr_coupled_1.5b"),
    "off_policy": lambda device: _stages(device, "countdown_1.5b", "rollout.off_policy_steps=1"),
    "vllm": vllm,
    "two_gpus": two_gpus,
    "vllm_pool": vllm_pool,
    **{f"tests_{which}": partial(promises, which=which) for which in ROOMS},
    "speed": speed,
    **{name: partial(_experiment, name) for name in ("quick", "rlcr", "countdown", "kg")},
}
"""In the order of what one would want to know first."""


def _run(command: list[str], device: str | None = None, **environment: str) -> str:
    """Runs a command to its end and returns what it printed; fails with the end of what it said."""
    variables = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", **environment}
    if device is not None:
        variables["RLX_TEST_DEVICE"] = device
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=variables, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")
        raise AssertionError(f"no end after {LONGEST:.0f} s; so far: {said[-4000:]}") from error
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def _sources() -> str:
    """A digest of all that the parts run."""
    digest = hashlib.sha256()
    for folder in ("platform", "plugins", "registry", "experiments", "tests"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".yaml", ".json"):
                digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    """Runs the parts that are still to be run; 0 when all have passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="may be repeated")
    parser.add_argument("--again", action="store_true", help="also parts that have passed")
    options = parser.parse_args()
    sources = _sources()
    report: Result = {"sources": sources, "device": options.device, "parts": {}}
    if options.out.exists():
        earlier = json.loads(options.out.read_text())
        if (earlier["sources"], earlier["device"]) == (sources, options.device):
            report = earlier
    for name in options.only or PARTS:
        if report["parts"].get(name, {}).get("ok") and not options.again:
            print(f"{name:<18} passed before", flush=True)
            continue
        began = time.monotonic()
        try:
            found: Result = {"ok": True, **PARTS[name](options.device)}
        except (AssertionError, subprocess.TimeoutExpired, KeyError, ValueError) as error:
            found = {"ok": False, "why": f"{type(error).__name__}: {error}"}
        found["seconds"] = round(time.monotonic() - began, 1)
        report["parts"][name] = found
        options.out.write_text(json.dumps(report, indent=2) + "\n")
        word = found.get("skipped", "passed") if found["ok"] else f"FAILED: {found['why'][-600:]}"
        print(f"{name:<18} {word}  ({found['seconds']} s)", flush=True)
    passed = [report["parts"].get(name, {}).get("ok", False) for name in PARTS]
    print(f"{sum(passed)} of {len(PARTS)} parts passed; written to {options.out}")
    return 0 if all(report["parts"][name]["ok"] for name in options.only or PARTS) else 1


if __name__ == "__main__":
    sys.exit(main())
