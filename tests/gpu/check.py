"""Checks rlx on a machine with a GPU, part by part; one JSON comes out.

    make gpu-check [WHEELS=folder] [ARGS="--only sampler --again"]

A part has at most 8 minutes for all that it starts. Results are written after each figure, and
parts that have passed on the same sources are not run again, so an interrupted check goes on where
it stopped. `tests/gpu/wheels.py` says which packages must be brought along where there is no
network.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from part import LONGEST, LONGEST_REHEARSAL, Part, PartSkippedError, Result

from rlx.descendants import adopt_orphans, kill_descendants

ROOT = Path(__file__).parents[2]
ROOMS = {
    "sampler": ("sampler",),
    "learner": ("learner",),
    "others": ("credit", "kl", "loss", "mask", "step", "batch", "reward", "rollout"),
}
"""Rooms whose tests are run; those that touch devices read RLX_TEST_DEVICE."""
MACHINE = """
import json, torch, sys
from importlib.metadata import version

here = torch.cuda.is_available()
print(json.dumps({"machine": {
    "python": sys.version.split()[0],
    "cuda": torch.version.cuda,
    "device": torch.cuda.get_device_name() if here else "cpu",
    "devices": torch.cuda.device_count(),
    "memory_gb": torch.cuda.mem_get_info()[1] / 1e9 if here else None,
    "bf16": here and torch.cuda.is_bf16_supported(),
    "packages": {n: version(n) for n in (
        "torch", "transformers", "deepspeed", "pydantic", "sqlalchemy", "rlx"
    )},
}}))
sys.exit("torch finds no CUDA device" if sys.argv[1] == "cuda" and not here else 0)
"""


def machine(part: Part) -> None:
    """What is here: the GPU, its driver, and what kernels are compiled with."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    compiler = shutil.which("gcc") or shutil.which("cc")
    folders = [name for name in ("/dev/shm", tempfile.gettempdir()) if Path(name).exists()]
    part.note(
        "compiler",
        name=compiler and Path(compiler).name,
        python_headers=headers.exists(),
        free_gb={folder: shutil.disk_usage(folder).free / 1e9 for folder in folders},
        cpus=len(os.sched_getaffinity(0)),
    )
    part.run([sys.executable, "-c", MACHINE, part.device])
    if part.device == "cuda" and not (compiler and headers.exists()):
        raise AssertionError(
            f"Triton needs a C compiler (gcc) and Python's headers ({headers}): install both, "
            "such as gcc and python3-dev"
        )


def kernels(part: Part, what: str) -> None:
    """What only a GPU shows of the learner or the sampler."""
    part.run_script("gpu_kernels", what, part.device)


def stages(part: Part, profile: str, *overrides: str) -> None:
    """Three steps of a profile with random weights: the peak of each stage beside the plan's."""
    part.run_script("stages", profile, part.device, *overrides)


def kill_and_resume(part: Part, name: str) -> None:
    """A run whose rank is killed, beside one that nothing happened to."""
    part.run_script("kill_resume", name, part.device)


def pretrained(part: Part, name: str, *, is_killed: bool = False) -> None:
    """An experiment on a pretrained model: the learning curve, and the figures of `stages`."""
    _require_weights()
    (kill_and_resume if is_killed else stages)(part, name)


def _require_weights() -> None:
    if not any((ROOT / "experiments" / "smollm2").glob("*.gguf")):
        raise PartSkippedError("the model is not here: python experiments/smollm2/fetch.py")


def vllm(part: Part) -> None:
    """The same with vLLM: how far it is from the learner, and whether both fit one GPU."""
    _require_vllm()
    stages(part, "rlcr_1.5b", "sampler={engine: vllm}")


def two_gpus(part: Part) -> None:
    """Two ranks with NCCL."""
    _require_gpus(part, 2)
    stages(part, "rlcr_1.5b", "runner.ranks=2")


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise PartSkippedError("vLLM is not installed here")


def _require_gpus(part: Part, wanted: int) -> None:
    if part.device == "cuda":
        count = part.run([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"])
        if int(count) < wanted:
            raise PartSkippedError(f"GPUs: {int(count)} of {wanted}")


def promises(part: Part, which: str) -> None:
    """The tests of rooms that compute; sampler and learner on this device."""
    rooms = [str(ROOT / "tests" / room) for room in ROOMS[which]]
    # Other versions of the libraries are here than in CI, and with them other warnings.
    arguments = ["-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    said = part.run([sys.executable, "-m", "pytest", *arguments, *rooms])
    part.note("tests", said=said.splitlines()[-1])


PARTS: dict[str, Callable[[Part], None]] = {
    "machine": machine,
    "learner": partial(kernels, what="learner"),
    "sampler": partial(kernels, what="sampler"),
    **{
        name: partial(stages, profile=name)
        for name in ("rlcr_1.5b", "countdown_1.5b", "rlcr_coupled_1.5b", "kg_1.5b")
    },
    "kill_quick": partial(kill_and_resume, name="quick"),
    "kill_rlcr_1.5b": partial(kill_and_resume, name="rlcr_1.5b"),
    "vllm": vllm,
    "two_gpus": two_gpus,
    **{f"tests_{which}": partial(promises, which=which) for which in ROOMS},
    "smollm2_grpo": partial(pretrained, name="smollm2_grpo"),
    "kill_smollm2": partial(pretrained, name="smollm2_grpo", is_killed=True),
    "smollm2_rlcr": partial(pretrained, name="smollm2_rlcr"),
}
"""In the order of what one would want to know first."""
GROUPS = {
    "smollm2": ("machine", "smollm2_grpo", "kill_smollm2", "smollm2_rlcr", "rlcr_1.5b"),
}
"""Parts that one name stands for: what is asked first of fifteen minutes on a GPU."""


def compute_sources_digest() -> str:
    """A digest of all that the parts run."""
    digest = hashlib.sha256()
    for folder in ("platform", "plugins", "registry", "experiments", "tests"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".yaml", ".json"):
                digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


class Report:
    """The JSON file: results by part, of one device and of the same sources.

    Args:
        path: if it has results of these sources on this device, they are kept.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        sources = compute_sources_digest()
        self._content: Result = {"sources": sources, "device": device, "parts": {}}
        if path.exists():
            earlier = json.loads(path.read_text())
            if (earlier["sources"], earlier["device"]) == (sources, device):
                self._content = earlier

    def has_passed(self, name: str) -> bool:
        """Whether a part has passed."""
        return bool(self._content["parts"].get(name, {}).get("ok"))

    def begin(self, name: str) -> Result:
        """The result of a part that begins; until it ends, it has been interrupted."""
        result: Result = {"ok": False, "why": "interrupted", "figures": {}}
        self._content["parts"][name] = result
        return result

    def write(self) -> None:
        """Writes the file, whole or not at all."""
        aside = self._path.with_name(f"{self._path.name}.part")
        aside.write_text(json.dumps(self._content, indent=2) + "\n")
        aside.replace(self._path)


def count_cpu_seconds() -> float:
    """Of all that this process has started, and that has ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_part(name: str, device: str, report: Report) -> None:
    """Runs a part, ends what it has left, and prints how it went."""
    began, spent, result = time.monotonic(), count_cpu_seconds(), report.begin(name)
    try:
        longest = LONGEST if device == "cuda" else LONGEST_REHEARSAL
        PARTS[name](Part(device, result, report.write, longest))
        result |= {"ok": True}
    except PartSkippedError as error:
        result |= {"ok": True, "skipped": str(error)}
    except Exception as error:  # the other parts still run
        result["why"] = f"{type(error).__name__}: {error}"
    finally:
        kill_descendants()
        if result["ok"]:
            del result["why"]
        result["seconds"] = round(time.monotonic() - began, 1)
        result["cpu_seconds"] = round(count_cpu_seconds() - spent, 1)
        report.write()
    word = result.get("skipped", "passed")
    if not result["ok"]:
        word = f"FAILED: {result['why']}\n{result.get('output', '')[-600:]}"
    print(f"{name:<18} {word}  ({result['seconds']} s)", flush=True)


def main() -> int:
    """Runs the parts that are still to be run; 0 when all have passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    names = [*PARTS, *GROUPS]
    parser.add_argument("--only", choices=names, action="append", help="may be repeated")
    parser.add_argument("--again", action="store_true", help="also parts that have passed")
    options = parser.parse_args()
    adopt_orphans()
    report = Report(options.out, options.device)
    chosen = [one for name in options.only or PARTS for one in GROUPS.get(name, [name])]
    for name in chosen:
        if report.has_passed(name) and not options.again:
            print(f"{name:<18} passed before", flush=True)
        else:
            run_part(name, options.device, report)
    passed = sum(map(report.has_passed, PARTS))
    print(f"{passed} of {len(PARTS)} parts passed; written to {options.out}")
    return 0 if all(map(report.has_passed, chosen)) else 1


if __name__ == "__main__":
    sys.exit(main())
