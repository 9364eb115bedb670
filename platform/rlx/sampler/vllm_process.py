"""The vLLM worker process: `python -m rlx.sampler.vllm_process DESCRIPTOR FOLDER...`.

It answers its rank over a pipe and exits when the pipe closes. Input and output are token ids.
"""

import json
import os
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rlx.importing import speed_up_imports
from rlx.model import PlainDialogue, pretrained_tokenizer
from rlx.sampler.draw import StopStringDetector

BLOCK = 32
"""Block size of the prefix cache in tokens: the smallest that vLLM supports on the CPU."""


def send_message(end: Connection, message: Mapping[str, Any]) -> None:
    """Sends a message as JSON, so that receiving one runs no code."""
    end.send_bytes(json.dumps(message).encode())


def receive_message(end: Connection) -> dict[str, Any]:
    """Waits for the next message; raises EOFError or OSError if the other process is gone."""
    message: dict[str, Any] = json.loads(end.recv_bytes())
    return message


def read_weights(end: Connection) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of the open file that the rank sends."""
    descriptor = reduction.recv_handle(end)
    try:
        with safe_open(f"/dev/fd/{descriptor}", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield name, file.get_tensor(name)
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class _PendingCompletion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"


class VllmWorker:
    """A vLLM engine whose weights are replaced by those of a learner."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        with speed_up_imports():
            from vllm import LLM
            from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        if on_cpu != (settings["device"] == "cpu"):
            raise RuntimeError(
                f"the ranks compute on {settings['device']}, but this vLLM is built for "
                f"{current_platform.device_name}"
            )
        self._sleeps, self._asleep = not on_cpu, False
        memory = {"gpu_memory_utilization": settings["gpu_memory_utilization"]}
        if on_cpu:
            memory = {"kv_cache_memory_bytes": settings["kv_cache_mb"] << 20}
        self._llm = LLM(
            model=settings["folder"],
            load_format="dummy",  # the rank sends the weights next, as after every update
            skip_tokenizer_init=True,
            generation_config="vllm",  # ignore the model's own sampling defaults
            dtype=settings["dtype"],
            # -1: the maximum that the model and the cache support
            max_model_len=-1 if on_cpu else settings["max_length"] or -1,
            max_num_seqs=settings["max_rows"],
            block_size=BLOCK,
            enable_prefix_caching=True,
            # Per-request seeds are not compatible with it on a CPU; on a GPU vLLM needs it.
            enable_chunked_prefill=not on_cpu,
            async_scheduling=False,
            enforce_eager=on_cpu,
            enable_sleep_mode=self._sleeps,
            logprobs_mode="processed_logprobs",  # those of the distribution that is sampled from
            disable_log_stats=True,
            seed=0,
            **memory,
        )
        self._ends: list[int] = settings["end_ids"]
        tokenizer = pretrained_tokenizer(Path(settings["folder"]))
        self._read = PlainDialogue(tokenizer, self._ends).read
        self._requests = 0  # how many completions have been asked for
        self.context_length: int = self._llm.model_config.max_model_len

    def answer(self, message: Mapping[str, Any], end: Connection) -> dict[str, Any]:
        """Handles a request of the rank: `sleep`, `load`, or `generate` of `rows`."""
        if message["ask"] == "sleep":
            if self._sleeps and not self._asleep:
                self._llm.sleep(level=2)  # without a copy of the weights: the next request has them
                self._asleep = True
            return {}
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        if message["ask"] == "load":  # if this fails, the model is in an undefined state
            weights = {"weights_iterator": read_weights(end)}
            self._llm.collective_rpc("reload_weights", kwargs=weights)
            self._drop_former_weights()
            return {}
        return {"rows": self._generate(message["rows"], message["sampling"])}

    def _drop_former_weights(self) -> None:
        """Drops what vLLM caches of the previous weights, which reloading alone does not."""
        self._llm.apply_model(repack_matrices)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")

    def _generate(
        self, rows: Sequence[tuple[list[int], int, int]], sampling: Mapping[str, Any]
    ) -> list[tuple[list[int], list[float], str]]:
        """Generates tokens, log-probabilities and finish reason of every row: a context, a seed and
        the maximum number of tokens."""
        engine = self._llm.llm_engine
        stop = StopStringDetector(self._read, sampling["stop"]) if sampling["stop"] else None
        completions = [_PendingCompletion() for _ in rows]
        pending: dict[str, _PendingCompletion] = {}
        for (context, seed, limit), completion in zip(rows, completions, strict=True):
            self._requests += 1
            pending[str(self._requests)] = completion
            parameters = self._build_parameters(sampling, seed, limit)
            engine.add_request(str(self._requests), {"prompt_token_ids": context}, parameters)
        while pending:
            for output in engine.step():
                found = pending.get(output.request_id)
                if found is None:  # ended by a stop string
                    continue
                self._append(found, output.outputs[0], stop)
                if found.finish_reason == "stop" and not output.finished:
                    engine.abort_request([output.request_id])
                elif not output.finished:
                    continue
                del pending[output.request_id]
        return [(c.token_ids, c.logprobs, c.finish_reason) for c in completions]

    def _append(
        self, completion: _PendingCompletion, new: Any, stop: StopStringDetector | None
    ) -> None:
        for token, logprobs in zip(new.token_ids, new.logprobs, strict=True):
            completion.token_ids.append(token)
            completion.logprobs.append(logprobs[token].logprob)
            if token in self._ends or (stop and stop.completes(completion.token_ids)):
                completion.finish_reason = "stop"
                break

    def _build_parameters(self, sampling: Mapping[str, Any], seed: int, limit: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if sampling["stop"] else RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            seed=seed,
            temperature=sampling["temperature"],
            top_p=sampling["top_p"],
            top_k=sampling["top_k"],
            max_tokens=limit,
            stop_token_ids=self._ends,
            ignore_eos=True,  # only the dialogue's end tokens end a turn
            detokenize=False,
            logprobs=0,  # only those of the sampled tokens
            output_kind=kind,
        )


def repack_matrices(model: nn.Module) -> None:
    """Repacks the matrices of tied embeddings and of experts.

    On the CPU, vLLM multiplies with packed copies of matrices. Reloading repacks those of linear
    layers, but not an output layer that is tied to the embeddings, whose logits would remain those
    of the old weights, nor the experts of a mixture, which would be read as if they were packed.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def main(descriptor: int, *folders: str) -> int:
    """Answers the rank until it is gone or a request fails; a failed worker is not reused. The
    folders are removed when the rank ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the rank handles these between two steps
        signal.signal(number, signal.SIG_IGN)
    leaving = Thread(target=_exit_with_rank, args=(descriptor, folders), daemon=True)
    leaving.start()
    end = Connection(descriptor)
    try:
        worker = VllmWorker(receive_message(end))
        send_message(end, {"longest": worker.context_length})
        with torch.inference_mode():
            while True:
                send_message(end, worker.answer(receive_message(end), end))
    except EOFError:
        leaving.join()
    except Exception as error:  # noqa: BLE001  (reported by the rank)
        traceback.print_exc()
        send_message(end, {"error": f"{type(error).__name__}: {error}"})
    return 1


def _exit_with_rank(descriptor: int, folders: Sequence[str]) -> None:
    """Exits this process immediately when the rank's end of the pipe closes for any reason."""
    poll = select.poll()
    poll.register(descriptor, 0)  # wakes up only when the other end closes
    poll.poll()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    code = main(int(sys.argv[1]), *sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the libraries' own farewell would hide the last words of an error
