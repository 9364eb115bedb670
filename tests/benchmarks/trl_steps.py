"""GRPO steps of TRL's trainer, one for each line that arrives; runs in TRL's own environment.

python trl_steps.py MODEL      as steps.py beside this file
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
        control.should_training_stop = not sys.stdin.readline()
        self.began = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        print(json.dumps({"cpu": time.process_time() - self.began}), flush=True)
        self.on_train_begin(args, state, control)


ROWS = 4
"""Of a micro-batch: all of them take 18 GB."""


def main(folder):
    torch.set_num_threads(1)
    case = json.loads((Path(folder) / "case.json").read_text())
    rows = case["prompts"] * case["answers"]
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=rows // ROWS,
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
    main(sys.argv[1])
