"""The vLLM worker process: `python -m rlx.sampler.vllm_worker DESCRIPTOR FOLDER...`.

It answers its rank over a pipe and exits when the pipe closes. vLLM runs inside it and starts no
processes of its own, so there is only one process to supervise. Input and output are token ids.
"""

import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlx.importing import speed_up_imports
from rlx.model import PlainDialogue, pretrained_tokenizer
from rlx.sampler.channel import Channel
from rlx.sampler.limits import StopStringDetector
from rlx.sampler.transfer import Group, join_process_group, receive_weights
from rlx.sampler.vllm_adapters import build_adapter_options, require_adapters, write_adapter

__all__ = ["VllmWorker", "main"]

BLOCK = 32
"""Block size of the prefix cache in tokens: the smallest that vLLM supports on the CPU."""


@dataclass(slots=True)
class _PendingCompletion:
    """A completion that is being generated."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"


class VllmWorker:
    """A vLLM engine whose weights are replaced by those of a learner.

    Args:
        settings: `folder` with configuration and tokenizer, the engine's options, and the `rank`,
            `alpha` and `layers` of the `adapter` that it takes, or None.

    Raises:
        ValueError: vLLM does not take such an adapter.
    """

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
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", 0)
        self._group: Group | None = None
        self._sleeps = settings["colocate"] and not on_cpu
        self._asleep = False
        memory = {"gpu_memory_utilization": settings["gpu_memory_utilization"]}
        if on_cpu:
            memory = {"kv_cache_memory_bytes": settings["kv_cache_mb"] << 20}
        self._adapter: Mapping[str, Any] | None = settings["adapter"]
        self._adapters = 0  # how many have been loaded
        self._request: Any = None  # names the adapter for vLLM
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
            **build_adapter_options(self._adapter),
        )
        if self._adapter:
            self._llm.apply_model(partial(require_adapters, layers=self._adapter["layers"]))
        self._ends: list[int] = settings["end_ids"]
        tokenizer = pretrained_tokenizer(Path(settings["folder"]))
        self._read = PlainDialogue(tokenizer, self._ends).read

    @property
    def context_length(self) -> int:
        """Maximum dialogue length of vLLM, in tokens."""
        longest: int = self._llm.model_config.max_model_len
        return longest

    def answer(self, message: Mapping[str, Any], channel: Channel) -> dict[str, Any]:
        """Handles one request of the rank."""
        if message["ask"] == "sleep":
            return self._sleep()
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        if message["ask"] == "load":
            return self._load(message, channel)
        if message["ask"] == "adapt":
            return self._load_adapter(self._receive(message, channel))
        return {"rows": self._generate(message["rows"], message["sampling"])}

    def _sleep(self) -> dict[str, Any]:
        """Releases GPU memory for the learner until the next request."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=2)  # without a copy of the weights: the next request brings them
            self._asleep = True
        return {}

    def _load(self, message: Mapping[str, Any], channel: Channel) -> dict[str, Any]:
        """Loads the rank's weights. If this fails, the model is in an undefined state."""
        iterator = self._receive(message, channel)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})
        self._request = None  # vLLM drops adapters of former weights
        self._refresh()
        return {}

    def _receive(
        self, message: Mapping[str, Any], channel: Channel
    ) -> Iterator[tuple[str, Tensor]]:
        """Receives what the rank sends after `message`."""
        if message["way"] == "nccl" and self._group is None:
            self._group = join_process_group(Path(message["place"]), 1, self._device)
        return receive_weights(message, channel, self._device, self._group)

    def _load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Loads an adapter under a number of its own: of a number that it knows, vLLM keeps the
        adapter that it has."""
        from vllm.lora.request import LoRARequest

        assert self._adapter is not None
        engine = self._llm.llm_engine
        if self._request:
            engine.remove_lora(self._request.lora_int_id)
        self._adapters += 1
        with tempfile.TemporaryDirectory() as folder:
            write_adapter(self._adapter, weights, Path(folder))
            self._request = LoRARequest(f"adapter {self._adapters}", self._adapters, folder)
            if not engine.add_lora(self._request):
                raise RuntimeError("vLLM did not take the adapter")
        self._empty_prefix_cache()
        return {}

    def _refresh(self) -> None:
        """Drops what vLLM caches of the previous weights, which reloading alone does not."""
        self._llm.apply_model(repack_matrices)
        self._empty_prefix_cache()

    def _empty_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")

    def _generate(
        self, rows: list[tuple[list[int], int]], sampling: Mapping[str, Any]
    ) -> list[tuple[list[int], list[float], str]]:
        """Returns one completion per (context, seed)."""
        engine = self._llm.llm_engine
        stop = StopStringDetector(self._read, sampling["stop"]) if sampling["stop"] else None
        pending = {str(number): _PendingCompletion() for number in range(len(rows))}
        for number, (context, seed) in enumerate(rows):
            params = self._params(sampling, seed)
            prompt = {"prompt_token_ids": context}
            engine.add_request(str(number), prompt, params, lora_request=self._request)
        ended = set()
        while engine.has_unfinished_requests():
            for output in engine.step():
                row, new = pending[output.request_id], output.outputs[0]
                for token, logprobs in zip(new.token_ids, new.logprobs, strict=True):
                    if output.request_id in ended:
                        break
                    row.token_ids.append(token)
                    row.logprobs.append(logprobs[token].logprob)
                    at_end = token in self._ends
                    if at_end or (stop and stop.completes(row.token_ids)):
                        row.finish_reason = "stop"
                        ended.add(output.request_id)
                        if not output.finished:
                            engine.abort_request([output.request_id])
        return [(r.token_ids, r.logprobs, r.finish_reason) for r in pending.values()]

    def _params(self, sampling: Mapping[str, Any], seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        looks = bool(sampling["stop"])
        return SamplingParams(
            seed=seed,
            temperature=sampling["temperature"],
            top_p=sampling["top_p"],
            top_k=sampling["top_k"],
            max_tokens=sampling["max_new_tokens"],
            stop_token_ids=self._ends,
            ignore_eos=True,  # only the dialogue's end tokens end a turn
            detokenize=False,
            logprobs=0,  # only those of the sampled tokens
            output_kind=RequestOutputKind.DELTA if looks else RequestOutputKind.FINAL_ONLY,
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
    """Answers the rank until it is gone or a request fails; a failed worker is not reused.

    Args:
        descriptor: file descriptor of this end of the pipe.
        folders: folders to remove when the rank ends.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the rank handles these between two steps
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_rank, args=(descriptor, folders), daemon=True).start()
    channel = Channel(Connection(descriptor))
    try:
        worker = VllmWorker(channel.receive())
        channel.send({"longest": worker.context_length})
        with torch.inference_mode():
            while True:
                channel.send(worker.answer(channel.receive(), channel))
    except EOFError:
        return 0
    except Exception as error:  # noqa: BLE001  (reported by the rank)
        traceback.print_exc()
        channel.send({"error": f"{type(error).__name__}: {error}"})
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
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
