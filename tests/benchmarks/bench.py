"""`make bench`: CPU time of whole training steps of rlx, and of others beside it.

    python tests/benchmarks/bench.py [BEGINNING]    those whose names begin so; all take an hour

Prints the rows of results/benchmarks.md. Each side is a process that takes a step when it is sent a
line, and answers with its CPU seconds. They take turns; a first round does not count.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from peer_environment import QUIET, make_peer_environment

from rlx.model import Policy, build_policy
from rlx.plan import read_spec

HERE = Path(__file__).parent
EXPERIMENTS = HERE.parents[1] / "experiments"
GRPO = {"prompts": 4, "answers": 8, "confidences": 0, "answer": 32, "confidence": 12}
BENCHMARKS = {
    "smollm2_grpo_step_vs_trl": ("trl", GRPO),
    "smollm2_grpo_step_strongest": ("plain", GRPO),
    "smollm2_grpo_step_strongest_8": ("plain", {**GRPO, "prompts": 8}),
    "smollm2_rlcr_step_strongest": (
        "plain",
        {**GRPO, "prompts": 6, "answers": 4, "confidences": 4},
    ),
}
"""By name: the other side, and what one step is."""
LONGEST = 400
"""Tokens that examples fill."""
ROUNDS = 3


def main(beginning: str) -> None:
    """Prints a row for every benchmark."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        policy = build_policy(read_spec(EXPERIMENTS / "smollm2_grpo.yaml").spec.model, seed=0)
        policy.save(model)
        texts = build_prompts(policy)
        del policy
        for benchmark, (other, case) in BENCHMARKS.items():
            if benchmark.startswith(beginning):
                (model / "case.json").write_text(json.dumps({**case, "texts": texts}))
                print(build_row(benchmark, measure(other, model)), flush=True)


def build_prompts(policy: Policy) -> list[str]:
    """Prompts of the model's chat that begin alike and have as many tokens."""
    file = EXPERIMENTS / "smollm2" / "train.jsonl"
    words = iter([json.loads(line) for line in file.read_text().splitlines()])
    messages = [{"role": "system", "content": "You know words."}]

    def render(question: str) -> tuple[int, str]:
        asked = [*messages, {"role": "user", "content": question}]
        text = policy.tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True
        )
        text += "<answer>"
        return len(policy.tokenizer(text)["input_ids"]), text

    while render("first letter of a")[0] < LONGEST:
        word = next(words)
        messages.append({"role": "user", "content": word["question"]})
        messages.append({"role": "assistant", "content": f"<answer>{word['answer']}</answer>"})
    by_length = defaultdict(list)
    for word in words:
        length, text = render(word["question"])
        by_length[length].append(text)
    return max(by_length.values(), key=len)


def measure(other: str, model: Path) -> list[tuple[float, float]]:
    """CPU seconds of steps of rlx, and of the other side."""
    commands = [[sys.executable, HERE / "steps.py", side] for side in ("ours", other)]
    if other == "trl":
        commands[1] = [make_peer_environment(HERE / "trl.txt"), HERE / "trl_steps.py"]
    sides = [
        subprocess.Popen(
            [*command, model],
            env={**os.environ, **QUIET, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    rounds = [tuple(map(take_step, sides)) for _ in range(1 + ROUNDS)]
    for side in sides:
        side.communicate()  # it ends with its input
    return rounds[1:]


def take_step(side: subprocess.Popen) -> float:
    """CPU seconds of one more step; what else a side prints is not for us."""
    side.stdin.write("go\n")
    side.stdin.flush()
    for line in side.stdout:
        if line.startswith("{"):
            return json.loads(line)["cpu"]
    raise RuntimeError("a side ended early")


def build_row(name: str, rounds: list[tuple[float, float]]) -> str:
    """A row of the table: the ratios, and milliseconds of both sides."""
    ratios = [theirs / ours for ours, theirs in rounds]
    shown = (statistics.median(ratios), min(ratios), max(ratios))
    times = [f"{1e3 * statistics.median(times):.0f}" for times in zip(*rounds, strict=True)]
    return f"| `{name}` | {' | '.join([*(f'{ratio:.3g}' for ratio in shown), *times])} |"


if __name__ == "__main__":
    main(*sys.argv[1:2] or [""])
