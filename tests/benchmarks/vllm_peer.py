"""One turn beside vLLM on the same CPU, and what it costs to start; `make bench` runs it.

    python tests/benchmarks/vllm_peer.py CASE

samples turns by rlx's own sampler in a process of its own, as peers/vllm_turns.py does by vLLM.
"""

import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from harness import Spent, beside, compared, in_turns, row
from peers import PEERS, Peer, peer_python

__all__ = ["one_turn_vs_vllm"]

CASE = {"prompts": 8, "prompt": 100, "answers": 8, "answer": 64, "vocabulary": 100}
ROUNDS = 5
STARTS = 3
IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def one_turn_vs_vllm() -> list[dict]:
    """8 prompts of 100 tokens, 8 answers of 64 each, warm; and the CPU time until the first."""
    case = json.dumps(CASE)
    starts: dict[str, list[float]] = {"vllm": [], "rlx": []}
    with tempfile.TemporaryDirectory() as folder:
        _save(Path(folder))
        commands = {
            "vllm": [peer_python("vllm"), PEERS / "vllm_turns.py", folder, case],
            "rlx": [sys.executable, Path(__file__), case],
        }
        for number in range(STARTS):
            with ExitStack() as processes:
                peers = {}
                for name, command in commands.items():
                    log = Path(folder) / f"{name}.log"
                    peer = Peer.started(command, log, **IN_PROCESS)
                    peers[name] = processes.enter_context(peer)
                    starts[name].append(peers[name].answer()["cpu"])
                if number == STARTS - 1:
                    sides = {name: peer.spent for name, peer in peers.items()}
                    took = in_turns(sides, ROUNDS, warm_up=2)
    ratios = [theirs / own for theirs, own in zip(starts["vllm"], starts["rlx"], strict=True)]
    theirs = beside("vLLM's start", starts["vllm"])
    own = 1e3 * statistics.median(starts["rlx"])
    return [
        compared("one_turn_vs_vllm", took["vllm"], took["rlx"], "vLLM 0.32 on the CPU, warm"),
        row("start_vs_vllm", ratios, theirs, "times as fast", milliseconds=own),
    ]


def _save(folder: Path) -> None:
    from models import save

    save(folder)


def main(case: dict) -> None:
    """Turns of `case`, for as long as lines arrive."""
    began = time.perf_counter()
    import torch
    from generation import drawn
    from harness import spent
    from models import policy

    from rlx.rollout import CompletionRequest
    from rlx.sampler import TransformersSampler
    from rlx.spec import TurnSpec

    torch.set_num_threads(1)
    sampler = TransformersSampler(policy(), max_rows=512, device=torch.device("cpu"))
    turn = TurnSpec(max_new_tokens=case["answer"])
    _tell(Spent(time.process_time(), time.perf_counter() - began))
    for number, _ in enumerate(sys.stdin):
        seeds = range(number * case["answers"], (number + 1) * case["answers"])
        requests = [
            CompletionRequest(prompt, None, tuple(seeds))
            for prompt in drawn(case["prompts"], case["prompt"], number)
        ]

        def once(requests: list[CompletionRequest] = requests) -> None:
            with sampler.session() as session:
                given = session.generate(requests, turn)
            tokens = sum(len(c.token_ids) for group in given for c in group)
            assert tokens == case["prompts"] * case["answers"] * case["answer"]

        _tell(spent(once))


def _tell(took: Spent) -> None:
    print(json.dumps({"cpu": took.cpu, "wall": took.wall}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
