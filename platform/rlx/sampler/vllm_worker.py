"""The vLLM worker process: `python -m rlx.sampler.vllm_worker DESCRIPTOR FOLDER...`.

It answers its rank over a pipe, and as a server of a pool other ranks over a socket; it exits when
the pipe closes. vLLM runs inside it and starts processes of its own only for tensor parallelism,
which end with it. Input and output are token ids.
"""

import os
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from rlx.importing import speed_up_imports
from rlx.model import PlainDialogue, pretrained_tokenizer
from rlx.sampler.channel import Channel
from rlx.sampler.limits import StopStringDetector
from rlx.sampler.transfer import SHARED_MEMORY, Group, join_process_group, receive_weights
from rlx.sampler.vllm_adapters import build_adapter_options, require_adapters, write_adapter
from rlx.sampler.vllm_model import reload_from_file, repack_matrices
from rlx.sampler.vllm_serving import serve

__all__ = ["VllmWorker", "main"]

BLOCK = 32
"""Block size of the prefix cache in tokens: the smallest that vLLM supports on the CPU."""


@dataclass(slots=True)
class _PendingCompletion:
    """A completion that is being generated, for the request of a rank."""

    asked: "_PendingRequest"
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"
    runs: list[tuple[int, int | None]] = field(default_factory=list)
    """Number of tokens, and the version of the weights that sampled them, run by run."""

    def end_run(self, version: int | None) -> None:
        """Says that the tokens since the last run were sampled by weights of a version."""
        if count := len(self.token_ids) - sum(tokens for tokens, _ in self.runs):
            self.runs.append((count, version))

    @property
    def completion(self) -> tuple[list[int], list[float], str, list[tuple[int, int | None]]]:
        """Tokens, log-probabilities, finish reason and runs."""
        return self.token_ids, self.logprobs, self.finish_reason, self.runs


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """Completions that a rank has asked for together; it waits for the last of them."""

    channel: Channel
    stop: StopStringDetector | None
    rows: list[_PendingCompletion] = field(default_factory=list)
    unfinished: int = 0


class VllmWorker:
    """A vLLM engine whose weights are replaced by those of a learner.

    Args:
        settings: `folder` with configuration and tokenizer, the engine's options, and the `rank`,
            `alpha` and `layers` of the `adapter` that it takes, or None.

    Attributes:
        version: number of the weights that it has, if the rank numbers them.

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
        self.version: int | None = None
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", 0)
        self._parts = settings["tensor_parallel"]
        self._is_repeatable: bool = settings["repeatable"]
        # New weights may come in the middle of a row.
        self._counts_tokens = settings["socket"] is not None and not self._is_repeatable
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
            tensor_parallel_size=self._parts,
            distributed_executor_backend="mp" if self._parts > 1 else None,
            **memory,
            **build_adapter_options(self._adapter),
        )
        unlink_shared_memory()
        if self._adapter:
            self._llm.apply_model(partial(require_adapters, layers=self._adapter["layers"]))
        self._ends: list[int] = settings["end_ids"]
        tokenizer = pretrained_tokenizer(Path(settings["folder"]))
        self._read = PlainDialogue(tokenizer, self._ends).read
        self._pending: dict[str, _PendingCompletion] = {}
        self._requests = 0  # how many completions have been asked for

    @property
    def context_length(self) -> int:
        """Maximum dialogue length of vLLM, in tokens."""
        longest: int = self._llm.model_config.max_model_len
        return longest

    @property
    def takes_adapter(self) -> bool:
        """Whether it takes adapters beside the weights."""
        return self._adapter is not None

    @property
    def is_generating(self) -> bool:
        """Whether completions are being generated."""
        return bool(self._pending)

    @property
    def can_begin(self) -> bool:
        """Whether it takes another request now."""
        return not (self._is_repeatable and self._pending)

    @property
    def has_lost_processes(self) -> bool:
        """Whether a process that vLLM started for a part of the model has ended."""
        return bool(getattr(self._llm.llm_engine.model_executor, "is_failed", False))

    def end_processes(self) -> None:
        """Ends the processes that vLLM started for parts of the model."""
        if self._parts > 1:
            self._llm.llm_engine.model_executor.shutdown()

    def answer(self, message: Mapping[str, Any], channel: Channel) -> dict[str, Any]:
        """Handles a request of the rank that started it, unless that is for completions."""
        if message["ask"] == "sleep":
            return self._sleep()
        self._wake()
        for row in self._pending.values():  # goes on with the new weights
            row.end_run(self.version)
        if message["ask"] == "load":
            self._load(message, channel)
        else:
            self._load_adapter(self._receive(message, channel))
        self.version = message.get("version")
        return {}

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _sleep(self) -> dict[str, Any]:
        """Releases GPU memory for the learner until the next request."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=2)  # without a copy of the weights: the next request brings them
            self._asleep = True
        return {}

    def _load(self, message: Mapping[str, Any], channel: Channel) -> None:
        """Loads the rank's weights. If this fails, the model is in an undefined state."""
        if self._parts > 1:  # every process opens the file by this one's descriptor
            descriptor = channel.receive_file()
            try:
                path = f"/proc/{os.getpid()}/fd/{descriptor}"
                self._llm.collective_rpc(reload_from_file, args=(path,))
            finally:
                os.close(descriptor)
        else:
            iterator = self._receive(message, channel)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})
        self._request = None  # vLLM drops adapters of former weights
        self._refresh()

    def _receive(
        self, message: Mapping[str, Any], channel: Channel
    ) -> Iterator[tuple[str, Tensor]]:
        """Receives what the rank sends after `message`."""
        if message["way"] == "nccl" and self._group is None:
            self._group = join_process_group(Path(message["place"]), 1, self._device)
        return receive_weights(message, channel, self._device, self._group)

    def _load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
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

    def _refresh(self) -> None:
        """Drops what vLLM caches of the previous weights, which reloading alone does not."""
        self._llm.apply_model(repack_matrices)
        self._empty_prefix_cache()

    def _empty_prefix_cache(self) -> None:
        """Empties the cache; rows that are being generated have theirs computed again."""
        if not self._llm.reset_prefix_cache(reset_running_requests=bool(self._pending)):
            raise RuntimeError("vLLM did not empty its prefix cache")

    def begin(self, message: Mapping[str, Any], channel: Channel) -> None:
        """Begins to generate one completion per (context, seed), beside those of other requests.

        Args:
            message: `rows`, not empty, and how to sample.
            channel: where the request came from; see `step`.
        """
        self._wake()
        if self._is_repeatable:
            self._empty_prefix_cache()
        sampling = message["sampling"]
        stop = StopStringDetector(self._read, sampling["stop"]) if sampling["stop"] else None
        request = _PendingRequest(channel, stop)
        for context, seed in message["rows"]:
            self._requests += 1
            row = self._pending[str(self._requests)] = _PendingCompletion(request)
            request.rows.append(row)
            request.unfinished += 1
            self._llm.llm_engine.add_request(
                str(self._requests),
                {"prompt_token_ids": context},
                self._params(sampling, seed),
                lora_request=self._request,
            )

    def step(self) -> Iterator[tuple[Channel, dict[str, Any]]]:
        """Generates one token of every row; yields the answers to requests that this completes,
        each with its channel."""
        for output in self._llm.llm_engine.step():
            row = self._pending.get(output.request_id)
            if row is None:  # ended by a stop string
                continue
            self._append(row, output.outputs[0])
            if row.finish_reason == "stop" and not output.finished:
                self._llm.llm_engine.abort_request([output.request_id])
            elif not output.finished:
                continue
            del self._pending[output.request_id]
            row.end_run(self.version)
            row.asked.unfinished -= 1
            if not row.asked.unfinished:
                yield row.asked.channel, {"rows": [row.completion for row in row.asked.rows]}

    def _append(self, row: _PendingCompletion, new: Any) -> None:
        """Appends new tokens to a row, until it ends."""
        for token, logprobs in zip(new.token_ids, new.logprobs, strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprobs[token].logprob)
            stop = row.asked.stop
            if token in self._ends or (stop and stop.completes(row.token_ids)):
                row.finish_reason = "stop"
                break

    def _params(self, sampling: Mapping[str, Any], seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        looks = bool(sampling["stop"]) or self._counts_tokens
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


def unlink_shared_memory() -> None:
    """Removes the names of the shared memory through which the parts of a model meet on a CPU. They
    have opened it by now, and would leave it behind. It has the name of their store."""
    for store in Path(tempfile.gettempdir()).glob("vllm_dist_*"):
        for path in SHARED_MEMORY.glob(f"{store.name}-*"):
            path.unlink(missing_ok=True)


def main(descriptor: int, *folders: str) -> int:
    """Answers the rank until it is gone or a request fails; a failed worker is not reused.

    Args:
        descriptor: file descriptor of this end of the pipe.
        folders: folders to remove when the rank ends.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the rank handles these between two steps
        signal.signal(number, signal.SIG_IGN)
    workers: list[VllmWorker] = []
    leaving = Thread(target=_exit_with_rank, args=(descriptor, folders, workers), daemon=True)
    leaving.start()
    channel = Channel(Connection(descriptor))
    try:
        settings = channel.receive()
        workers.append(VllmWorker(settings))
        channel.send({"longest": workers[0].context_length})
        with torch.inference_mode():
            serve(workers[0], channel, settings["socket"])
    except EOFError:
        leaving.join()
    except Exception as error:  # noqa: BLE001  (reported by the rank)
        traceback.print_exc()
        if not (workers and workers[0].has_lost_processes):  # else it is as good as killed
            channel.send({"error": f"{type(error).__name__}: {error}"})
        for worker in workers:
            worker.end_processes()
    return 1


def _exit_with_rank(descriptor: int, folders: Sequence[str], workers: list[VllmWorker]) -> None:
    """Exits this process immediately when the rank's end of the pipe closes for any reason."""
    poll = select.poll()
    poll.register(descriptor, 0)  # wakes up only when the other end closes
    poll.poll()
    for worker in workers:
        worker.end_processes()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    code = main(int(sys.argv[1]), *sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the libraries' own farewell would hide the last words of an error
