"""One turn sampled by vLLM for each line that arrives; runs in vLLM's own environment.

    python vllm_turns.py MODEL CASE          CASE is JSON; see vllm_peer.py beside this folder

Prints what the start took when it is ready, and after every turn one line with its seconds,
{"cpu": …, "wall": …}. vLLM runs within this process, so its CPU time is this process's.
"""

import json
import random
import sys
import time

BEGAN = time.perf_counter()


def told(cpu, wall):
    spent = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    print(json.dumps(spent), flush=True)


def main(folder, case):
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    rows = case["prompts"] * case["answers"]
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="float32",
        max_model_len=case["prompt"] + case["answer"],
        max_num_seqs=rows,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        disable_log_stats=True,
        seed=0,
    )
    sampling = SamplingParams(
        n=case["answers"],
        temperature=1.0,
        ignore_eos=True,
        max_tokens=case["answer"],
        detokenize=False,
    )
    told(0.0, BEGAN)
    for number, _ in enumerate(sys.stdin):
        rng = random.Random(number)  # new prompts: its cache of prefixes must not know them
        prompts = [
            {
                "prompt_token_ids": [
                    rng.randrange(4, case["vocabulary"]) for _ in range(case["prompt"])
                ]
            }
            for _ in range(case["prompts"])
        ]
        cpu, wall = time.process_time(), time.perf_counter()
        given = llm.generate(prompts, sampling, use_tqdm=False)
        tokens = sum(len(out.token_ids) for request in given for out in request.outputs)
        assert tokens == rows * case["answer"]
        told(cpu, wall)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
