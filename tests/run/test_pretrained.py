"""Four steps through small checkpoints, with a chat template, and with and without adapters."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import STYLES, make_checkpoint
from homes import Home
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rlx.checkpoint import write_weights
from rlx.spec import ExperimentSpec

ASKED = Path(__file__).parents[2] / "experiments" / "rlcr_asked.yaml"
WARM = "{steps: 60, batch_size: 16, learning_rate: 1e-2, warmup_steps: 5}"
SMALL = {
    "rollout.system": "You help.",
    "rollout.prompts_per_step": 3,
    "rollout.num_generations_answer": 4,
    "rollout.answer.max_new_tokens": 24,
    "rollout.num_generations_confidence": 2,
    "rollout.confidence.max_new_tokens": 14,
    "phases.0.steps": 1,
    "phases.1.steps": 3,
    "evaluation.problems": 4,
    "loss.old_logprobs": "learner",
}


@pytest.fixture(scope="module", params=["qwen2-chatml-null", "llama-headers-{rank: 4}"])
def run(request, tmp_path_factory):
    """A finished run on a checkpoint that was not made by rlx."""
    family, style, lora = request.param.split("-")
    checkpoint = make_checkpoint(tmp_path_factory.mktemp(family), family, style)
    model = f"{{kind: pretrained, path: {checkpoint}, warm_start: {WARM}, lora: {lora}}}"
    home = Home(tmp_path_factory.mktemp("asked"))
    record = home.submit(ASKED, {**SMALL, "model": model})
    (start,) = (home.path / "cache" / "warm_start").iterdir()
    model = Path(record.directory) / "model"
    return SimpleNamespace(
        style=style,
        lora=lora,
        start=start,
        model=model,
        bodies=list(home.bodies(record)),
    )


def test_the_steps_pass_and_something_is_learned(run):
    assert [step for step, *_ in run.bodies] == [1, 2, 3, 4]
    before, after = (
        dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        for folder in (run.start, run.model)
    )
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved
    if run.lora != "null":
        assert all("proj" in name and name.endswith("weight") for name in moved)


def test_the_last_checkpoint_exports_as_the_run_does(run, tmp_path):
    root = run.model.parent
    spec = ExperimentSpec.model_validate_json((root / "spec.json").read_text())
    write_weights(spec, root / "checkpoints" / "step_000004", tmp_path / "model")
    exported = PreTrainedTokenizerFast.from_pretrained(run.model)
    assert exported.chat_template == STYLES[run.style].template
    files = [path for path in run.model.rglob("*") if path.is_file()]
    assert any("adapter" in path.parts for path in files) == (run.lora != "null")
    for file in files:
        if file.name == "adapter_config.json":  # peft writes a set, in an order of its own
            continue
        again = tmp_path / "model" / file.relative_to(run.model)
        assert again.read_bytes() == file.read_bytes(), file.name
