"""Ten steps through small checkpoints, with a chat template, and with and without adapters."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import STYLES, make_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rlx.checkpoint import write_weights
from rlx.spec import ExperimentSpec

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SYSTEM = "You help."
WARM = "{steps: 60, batch_size: 16, learning_rate: 1e-2, warmup_steps: 5}"
SMALL = {
    "rollout.system": SYSTEM,
    "rollout.prompts_per_step": 3,
    "rollout.num_generations_answer": 4,
    "rollout.answer.max_new_tokens": 24,
    "evaluation.problems": 4,
    "loss.old_logprobs": "learner",
    "runner.checkpoint.keep_finished": "true",
    "tracking.mlflow": "null",
}
OF = {
    "rlcr_asked": {
        **SMALL,
        "rollout.num_generations_confidence": 2,
        "rollout.confidence.max_new_tokens": 14,
        "phases.0.steps": 3,
        "phases.1.steps": 7,
    },
    "countdown": {**SMALL, "phases.0.steps": 10},
}
CHECKPOINTS = {"qwen2": "chatml", "llama": "headers"}
ADAPTERS = {"full": "null", "lora": "{rank: 4}"}
CASES = [
    ("rlcr_asked", "qwen2", "full"),
    ("countdown", "llama", "full"),
    ("countdown", "qwen2", "lora"),
    ("rlcr_asked", "llama", "lora"),
]
"""Each two of experiment, family and adapter meet once."""


@dataclass(frozen=True)
class Run:
    """A run that was followed to its end."""

    experiment: str
    style: str
    lora: str
    start: Path
    model: Path
    bodies: list

    def tokenizer(self):
        return PreTrainedTokenizerFast.from_pretrained(self.model)

    def whole(self, *said, prompt=True):
        """A dialogue as the template shows it, as text."""
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]
        return self.tokenizer().apply_chat_template(
            messages, add_generation_prompt=prompt, tokenize=False
        )


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def run(request, home, tmp_path_factory):
    """A run on a checkpoint that was not made by rlx."""
    experiment, family, adapter = request.param
    lora = ADAPTERS[adapter]
    checkpoint = make_checkpoint(tmp_path_factory.mktemp(family), family, CHECKPOINTS[family])
    model = f"{{kind: pretrained, path: {checkpoint}, warm_start: {WARM}, lora: {lora}}}"
    own = type(home)(tmp_path_factory.mktemp(experiment))
    sets = {"model": model, **OF[experiment]}
    try:
        done = own.rlx("submit", EXPERIMENTS / f"{experiment}.yaml", sets=sets)
        assert done.returncode == 0, done.stderr
        yield finished(own, experiment, family, lora)
    finally:
        for pid in own.processes():
            os.kill(pid, signal.SIGKILL)


def finished(home, experiment, family, lora):
    record = home.run("r-0001")
    (start,) = (home.path / "cache" / "warm_start").iterdir()
    return Run(
        experiment=experiment,
        style=CHECKPOINTS[family],
        lora=lora,
        start=start,
        model=Path(record.directory) / "model",
        bodies=list(home.bodies(record)),
    )


def turns(run, *kinds):
    """Every turn of the run: its step, tree, segment, and the segments above it."""
    for step, trees, _ in run.bodies:
        for tree in trees:
            for segment in tree["segments"]:
                if segment["kind"] in kinds:
                    above, at = [], segment["parent"]
                    while at >= 0:
                        above.insert(0, tree["segments"][at])
                        at = above[0]["parent"]
                    yield step, tree, segment, above


def ids(segments):
    return [token for segment in segments for token in segment["token_ids"]]


def test_ten_steps_pass_and_something_is_learned(run):
    assert [step for step, *_ in run.bodies] == list(range(1, 11))
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
    write_weights(spec, root / "checkpoints" / "step_000010", tmp_path / "model")
    files = [path for path in run.model.rglob("*") if path.is_file()]
    assert any("adapter" in path.parts for path in files) == (run.lora != "null")
    for file in files:
        if file.name == "adapter_config.json":  # peft writes a set, in an order of its own
            continue
        again = tmp_path / "model" / file.relative_to(run.model)
        assert again.read_bytes() == file.read_bytes(), file.name


def test_prompts_wear_the_template(run):
    tokenizer = run.tokenizer()
    assert tokenizer.chat_template == STYLES[run.style].template
    for _, tree, _, above in turns(run, "answer"):
        assert len(above) == 1
        assert tokenizer.decode(above[0]["token_ids"]) == run.whole(SYSTEM, tree["prompt"])


def test_second_turns_continue_the_sampled_tokens(run):
    tokenizer = run.tokenizer()
    closer = tokenizer.convert_tokens_to_ids(STYLES[run.style].closes)
    seen = set()
    for _, tree, _, (root, answer, question) in turns(run, "confidence"):
        closed = answer["finish_reason"] == "stop"
        seen.add(closed)
        assert (answer["token_ids"][-1] == closer) == closed
        assert (question["token_ids"][0] == closer) == (not closed)
        text = answer["text"]
        if text == text.strip() and "\N{REPLACEMENT CHARACTER}" not in text:
            shown = tokenizer.decode(ids([root, answer, question]))
            assert shown == run.whole(SYSTEM, tree["prompt"], text, "sure?\n")
    assert seen == ({True, False} if run.experiment == "rlcr_asked" else set())


def test_the_first_step_samples_from_the_model_that_was_given(run):
    model = AutoModelForCausalLM.from_pretrained(run.start, dtype=torch.float32)
    for step, _, turn, above in turns(run, "answer"):
        if step > 1:
            break
        row, own = ids([*above, turn]), len(turn["token_ids"])
        with torch.no_grad():
            logprobs = model(torch.tensor([row])).logits[0].log_softmax(dim=-1)
        plain = [logprobs[at - 1, row[at]].item() for at in range(len(row) - own, len(row))]
        assert turn["behaviour_logprobs"] == pytest.approx(plain, abs=5e-5)


def test_sampler_and_learner_agree_at_every_step(run):
    learned = set()
    for step, trees, _ in run.bodies:
        for tree in trees:
            for row in tree["rows"]:
                if any(row["advantages"]):  # the learner computes what it learns from
                    sampled = tree["segments"][row["segment"]]["behaviour_logprobs"]
                    own = [p for p, m in zip(sampled, row["mask"], strict=True) if m]
                    old = [p for p, m in zip(row["old_logprobs"], row["mask"], strict=True) if m]
                    assert old == pytest.approx(own, abs=5e-5)
                    learned.add(step)
    assert len(learned) > 5
