"""Takes a step of GRPO and one of RLCR with a small model of every architecture, sampled by vLLM.

    python tests/learner/measure_vllm_architectures.py [MODEL_TYPE ...]

It fills `vllm_architectures.json` beside this file, from which `make docs` takes the column of
vLLM. Every model has a process of its own, and an engine: about half a CPU-minute. Model types that
are in the file stay as they are, unless they are named. The second step is sampled with the weights
that the first has updated.
"""

import json
import re
import subprocess
import sys
import tempfile
from importlib.metadata import packages_distributions, version
from pathlib import Path

FOUND = Path(__file__).with_suffix("").with_name("vllm_architectures.json")
DEADLINE = 400.0
"""Seconds that a model may take."""
WIDER = {
    "hidden_size": 128,
    "head_dim": 32,
    "n_embd": 128,
    "d_model": 128,
    "word_embed_proj_dim": 128,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "mamba_d_head": 32,
}
"""Sizes in place of those of the same name: vLLM has no attention with heads of 8 on the CPU."""
EXPERTS = {
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
"""Sizes of models with experts: those that vLLM pads to a multiple of 32, it cannot reload."""


def measure_here(kind, out):
    """Writes the figures of one architecture, or why vLLM does not sample from it."""
    import torch
    from measure_architectures import MODELS, SIZES, prepare, save_model, take_steps

    from rlx.errors import RlxError
    from rlx.model import build_policy
    from rlx.sampler import open_sampler
    from rlx.spec import PretrainedModelSpec, RunnerSpec, VllmSamplerSpec

    small = {**SIZES, **MODELS[kind]}
    wider = {**WIDER, **(EXPERTS if "num_experts" in small else {})}
    small |= {name: size for name, size in wider.items() if name in small}
    recipes, ranks = prepare()
    engine = VllmSamplerSpec(engine="vllm", max_rows=16, kv_cache_mb=32)
    with tempfile.TemporaryDirectory() as folder:
        save_model(kind, small, Path(folder), chat=list(MODELS).index(kind) % 2 == 0)
        policy = build_policy(PretrainedModelSpec(path=folder), 0)
        try:
            with open_sampler(policy, engine, RunnerSpec(), torch.device("cpu")) as sampler:
                steps = take_steps(policy, sampler, recipes, ranks)["steps"]
        except RlxError as error:
            found = {"refused": shorten(str(error))}
        else:
            found = {"drift": max(step["apart"] for step in steps.values())}
    out.write_text(json.dumps(found))


def shorten(message):
    """The words of vLLM, without what rlx and pydantic say around them."""
    own = message.partition("; the full error is in the run's log")[0]
    own = re.sub(r"^vLLM could not [^:]*: ", "", own)
    own = own.replace("\\n", " ").partition(" [type=")[0].partition(" Supported architectures:")[0]
    return " ".join(re.sub(r"^ValidationError: .*? for \w+ ", "", own).split())


def measure_apart(kind):
    """The figures of one architecture, from a process that is ended at the deadline."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--here", kind, str(out)]
        try:
            done = subprocess.run(
                command, timeout=DEADLINE, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return {"refused": f"no figure within {DEADLINE:g} seconds"}
        if out.exists():
            return json.loads(out.read_text())
    raise SystemExit(f"{kind}: exit code {done.returncode}\n{done.stderr[-4000:]}")


def main(named):
    from measure_architectures import MODELS

    installed = version(packages_distributions()["vllm"][0])
    found = {"vllm": installed, "models": {}}
    if FOUND.exists() and (before := json.loads(FOUND.read_text()))["vllm"] == installed:
        found = before
    for kind in named or [kind for kind in MODELS if kind not in found["models"]]:
        found["models"][kind] = measure_apart(kind)
        print(kind, found["models"][kind], flush=True)
        FOUND.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        measure_here(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1:])
