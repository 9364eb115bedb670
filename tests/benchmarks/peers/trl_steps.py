"""GRPO steps of TRL's trainer, one for each line that arrives; runs in TRL's own environment.

    python trl_steps.py MODEL CASE    CASE is a file of JSON; see real_steps.py beside this folder

Prints a line when it is ready, and after every step one with its seconds, {"cpu": …, "wall": …}.
"""

import json
import sys
import tempfile
import time
import zlib
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class OneByOne(TrainerCallback):
    """Waits for a line before each step, and tells what the step took."""

    def on_train_begin(self, args, state, control, **kwargs):
        told({"ready": True})
        self.wait(control)

    def on_step_end(self, args, state, control, **kwargs):
        cpu, wall = time.process_time() - self.cpu, time.perf_counter() - self.wall
        told({"cpu": cpu, "wall": wall})
        self.wait(control)

    def wait(self, control):
        control.should_training_stop = not sys.stdin.readline()
        self.cpu, self.wall = time.process_time(), time.perf_counter()


def told(line):
    print(json.dumps(line), flush=True)


def main(folder, case):
    torch.set_num_threads(1)
    rows = case["prompts"] * case["answers"]
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=case["rows"],
        gradient_accumulation_steps=rows // case["rows"],
        num_generations=case["answers"],
        max_completion_length=case["answer"],
        generation_kwargs={"min_new_tokens": case["answer"]},
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=1000,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        seed=0,
    )

    def score(completions, **kwargs):
        return [zlib.crc32(text.encode()) / 2**32 for text in completions]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=score,
        args=options,
        train_dataset=Dataset.from_list([{"prompt": text} for text in case["texts"]]),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[OneByOne()],
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
