"""The process in which vLLM samples: `python -m rlx.sampler.vllm_worker DESCRIPTOR FOLDER...`.

It answers its rank over a pipe and ends when that closes. vLLM runs within it and starts no
processes of its own, so one thing is alive or dead, and tokens alone go in and out.
"""

import os
import select
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlx.importing import speed_up_imports
from rlx.model import PlainDialogue, pretrained_tokenizer
from rlx.sampler.channel import Channel
from rlx.sampler.limits import completes_stop_string
from rlx.sampler.transfer import Group, join_process_group, receive_weights

__all__ = ["VllmWorker", "main"]

BLOCK = 32
"""Tokens of a block of the prefix cache: the fewest that vLLM knows on the CPU."""


@dataclass(slots=True)
class _PendingCompletion:
    """A completion under way."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"


class VllmWorker:
    """vLLM, and what it takes to keep its weights those of a learner.

    Args:
        settings: `folder` of configuration and tokenizer, and the engine's options.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        with speed_up_imports():
            from vllm import LLM
            from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        if on_cpu != (settings["device"] == "cpu"):
            raise RuntimeError(
                f"the ranks compute on {settings['device']}, and this vLLM is built for "
                f"{current_platform.device_name}"
            )
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", 0)
        self._group: Group | None = None
        self._sleeps = settings["colocate"] and not on_cpu
        self._asleep = False
        memory = {"gpu_memory_utilization": settings["gpu_memory_utilization"]}
        if on_cpu:
            memory = {"kv_cache_memory_bytes": settings["kv_cache_mb"] << 20}
        self._llm = LLM(
            model=settings["folder"],
            load_format="dummy",  # the rank's weights follow at once, by the way they always take
            skip_tokenizer_init=True,
            generation_config="vllm",  # what sampling asks for, and nothing that the model brings
            dtype=settings["dtype"],
            max_model_len=-1,  # as many as the model and the cache hold
            max_num_seqs=settings["max_rows"],
            block_size=BLOCK,
            enable_prefix_caching=True,
            enable_chunked_prefill=False,  # cut prompts and seeds of their own do not go together
            async_scheduling=False,
            enforce_eager=on_cpu,
            enable_sleep_mode=self._sleeps,
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            disable_log_stats=True,
            seed=0,
            **memory,
        )
        self._ends: list[int] = settings["end_ids"]
        tokenizer = pretrained_tokenizer(Path(settings["folder"]))
        self._read = PlainDialogue(tokenizer, self._ends).read

    @property
    def context_length(self) -> int:
        """Tokens of a dialogue that vLLM can hold."""
        longest: int = self._llm.model_config.max_model_len
        return longest

    def answer(self, message: Mapping[str, Any], channel: Channel) -> dict[str, Any]:
        """Does what the rank asks for."""
        if message["ask"] == "sleep":
            return self._sleep()
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        if message["ask"] == "load":
            return self._load(message, channel)
        return {"rows": self._generate(message["rows"], message["sampling"])}

    def _sleep(self) -> dict[str, Any]:
        """Gives a GPU's memory to the learner until there is something to do."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True
        return {}

    def _load(self, message: Mapping[str, Any], channel: Channel) -> dict[str, Any]:
        """Takes the rank's weights. When it fails, no module is sound any more."""
        if message["way"] == "nccl" and self._group is None:
            self._group = join_process_group(Path(message["place"]), 1, self._device)
        iterator = receive_weights(message, channel, self._device, self._group)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})
        self._refresh()
        return {}

    def _refresh(self) -> None:
        """Drops what vLLM keeps of former weights, which reloading alone does not."""
        self._llm.apply_model(repack_matrices)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")

    def _generate(
        self, rows: list[tuple[list[int], int]], sampling: Mapping[str, Any]
    ) -> list[tuple[list[int], list[float], str]]:
        """One completion per (context, seed)."""
        engine, stop = self._llm.llm_engine, sampling["stop"]
        under_way = {str(number): _PendingCompletion() for number in range(len(rows))}
        for number, (context, seed) in enumerate(rows):
            params = self._params(sampling, seed)
            engine.add_request(str(number), {"prompt_token_ids": context}, params)
        ended = set()
        while engine.has_unfinished_requests():
            for output in engine.step():
                row, said = under_way[output.request_id], output.outputs[0]
                for token, told in zip(said.token_ids, said.logprobs, strict=True):
                    if output.request_id in ended:
                        break
                    row.token_ids.append(token)
                    row.logprobs.append(told[token].logprob)
                    at_end = token in self._ends
                    if at_end or (stop and completes_stop_string(self._read, stop, row.token_ids)):
                        row.finish_reason = "stop"
                        ended.add(output.request_id)
                        if not output.finished:
                            engine.abort_request([output.request_id])
        return [(r.token_ids, r.logprobs, r.finish_reason) for r in under_way.values()]

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
            ignore_eos=True,  # the ends are those of the dialogue, and no others
            detokenize=False,
            logprobs=0,  # of the token that was drawn alone
            output_kind=RequestOutputKind.DELTA if looks else RequestOutputKind.FINAL_ONLY,
        )


def repack_matrices(model: nn.Module) -> None:
    """Packs matrices of tied embeddings anew.

    On the CPU vLLM multiplies by packed copies of matrices. Reloading packs those of linear layers
    again, and forgets an output layer that is tied to the embeddings: its logits stay those of the
    old weights.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def main(descriptor: int, *folders: str) -> int:
    """Answers the rank until it is gone, or something fails, after which nothing can be trusted.

    Args:
        descriptor: of this end of the pipe.
        folders: to be removed with the rank.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the rank stops between two steps
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
    except Exception as error:  # noqa: BLE001  (the rank says it)
        traceback.print_exc()
        channel.send({"error": f"{type(error).__name__}: {error}"})
        return 1


def _exit_with_rank(descriptor: int, folders: Sequence[str]) -> None:
    """Ends this process at once when the rank's end of the pipe is closed, by whatever death."""
    poll = select.poll()
    poll.register(descriptor, 0)  # nothing but the other end's closing
    poll.poll()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
