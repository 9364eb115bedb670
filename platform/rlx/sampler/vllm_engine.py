"""Samples with vLLM in a worker process beside the rank, `rlx.sampler.vllm_process`.

Nothing is tokenized twice: a turn's context consists of exactly the tokens sampled before, and
vLLM's prefix cache finds those it has read. A killed worker is restarted once: it loads the weights
published last, and the request is repeated, which gives the same result since every row has its own
seed.
"""

import copy
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlx.errors import RlxError, SpecError
from rlx.model import Policy, StoredForm
from rlx.rollout import Completion, CompletionRequest
from rlx.sampler.draw import require_context_room, require_finite_logits
from rlx.sampler.engine import SamplingEngine, require_vllm
from rlx.sampler.vllm_process import receive_message, send_message
from rlx.spec import RunnerSpec, TurnSpec
from rlx.spec import VllmSamplerSpec as VllmSpec
from rlx.text import escape_unprintable

SHARED_MEMORY = Path("/dev/shm")
WORKER = "rlx.sampler.vllm_process"
WORKER_OPTIONS = ("max_rows", "kv_cache_mb", "max_length", "gpu_memory_utilization")
"""Settings of the `sampler:` section that the worker is started with."""
EXIT_SECONDS = 10.0
"""Seconds that a worker has to exit before it is killed."""
LENGTH_STEP = 1024
"""Lengths of dialogues that a worker is restarted for are multiples of this."""
RANK_VARIABLES = ("TORCHELASTIC_", "GROUP_", "LOCAL_", "MASTER_", "ROLE_", "RANK", "WORLD_SIZE")
"""Environment variables of a rank; with them, vLLM would act as a rank."""
SAME_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Has vLLM use the model runner on a GPU that it uses on a CPU, where rlx is tested with it."""

Row = tuple[tuple[int, ...], int, int]
"""Context, seed and maximum number of tokens of a completion."""


@contextmanager
def open_vllm(
    policy: Policy, spec: VllmSpec, runner: RunnerSpec, device: torch.device
) -> Iterator["VllmSampler"]:
    """See `rlx.sampler.open_sampler`."""
    sampler = VllmSampler(policy, spec, runner, device)
    try:
        yield sampler
    finally:
        sampler.close()


class VllmSampler(SamplingEngine):
    """Samples completions; its worker owns its own copy of the weights.

    The policy is not kept. Adapters that training adds to it arrive merged into the weights.

    Attributes:
        limits: maximum dialogue length of the model, and the one that fits into the KV cache, both
            in tokens.

    Raises:
        EnvironmentFault: vLLM is not installed.
        RlxError: vLLM cannot run this model here.
    """

    description = "vLLM in a separate process"

    def __init__(
        self, policy: Policy, spec: VllmSpec, runner: RunnerSpec, device: torch.device
    ) -> None:
        require_vllm()
        self._device = device
        self._dtype: torch.dtype = getattr(torch, runner.dtype)
        self._weights: WeightFile | None = None
        self._stored = StoredForm(policy.model)
        self._config, self._tokenizer = copy.deepcopy(policy.model.config), policy.tokenizer
        self._config.architectures = [type(policy.model).__name__]
        self._settings: dict[str, Any] = {
            **spec.model_dump(include=set(WORKER_OPTIONS)),
            "dtype": runner.dtype,
            "device": device.type,
            "end_ids": list(policy.end_ids),
        }
        name = f"rlx-vllm-{secrets.token_hex(4)}"
        temporary = Path(tempfile.gettempdir())  # a run's own, by whose name its supervisor sweeps
        self._folders = temporary / name, SHARED_MEMORY / f"{temporary.name}-{name}"
        own = {"TMPDIR": str(self._folders[0])}
        self._environment = build_worker_environment(runner.threads, device) | own
        self._worker, cache_limit = self._start_worker()
        self.limits = policy.context_length, cache_limit
        try:
            self.load(dict(policy.model.named_parameters()))
        except BaseException:
            self.close()
            raise

    @property
    def context_length(self) -> int:
        return self.limits[0] if self._grows else min(self.limits)

    @property
    def _grows(self) -> bool:
        return self._device.type == "cuda" and self._settings["max_length"] is not None

    def make_room(self, length: int) -> None:
        """Restarts the worker for dialogues of `length` tokens, if it was started for shorter
        ones."""
        model, memory = self.limits
        if self._grows and memory < length <= model:
            self._settings["max_length"] = min(model, -(-length // LENGTH_STEP) * LENGTH_STEP)
            self._worker.close()
            self._worker, memory = self._start_worker()
            self.limits = model, memory
            self._load_published_weights()

    def _start_worker(self) -> tuple["WorkerProcess", int]:
        """Starts a worker; returns it with the maximum dialogue length in tokens."""
        torch.cuda.empty_cache()  # on a GPU, vLLM needs all of its share at once
        folder, _ = self._folders
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        worker = WorkerProcess(self._environment, self._folders)
        self._config.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        settings = {**self._settings, "folder": str(folder)}
        try:
            answer = worker.ask(settings, "start with this model")
        except WorkerGone as gone:
            raise RlxError(
                f"{gone} before it could start; its last output is in the run's log"
            ) from gone
        return worker, answer["longest"]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.load_each(iter(drop_tied_weights(weights).items()))

    def load_each(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._weights is not None:
            self._weights.close()
        self._weights = None
        collected = collect_weights(weights, self._dtype)
        self._weights = WeightFile(self._stored.convert(collected), self._folders)
        self.drift = None
        self._load_published_weights()

    def _load_published_weights(self) -> None:
        """Wakes the worker, if it sleeps, and sends it the weights."""
        if not self.holds_weights:
            torch.cuda.empty_cache()  # as in `_start_worker`
        self._ask({"ask": "load"}, "take the learner's weights")
        self.holds_weights = True

    @contextmanager
    def session(self) -> Iterator["VllmSampler"]:
        yield self  # stateless: vLLM's prefix cache recognizes contexts by their tokens

    def release(self) -> None:
        """Releases the GPU memory of the worker, weights included, until the next request."""
        if self._device.type == "cuda" and self.holds_weights:
            self._ask({"ask": "sleep"}, "sleep")
            self.holds_weights = False

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """See `rlx.rollout.SamplingSession`.

        Raises:
            SpecError: a dialogue could outgrow the model, or the temperature is too low for vLLM.
            RlxError: vLLM failed.
        """
        lengths = (len(r.context) + r.limit_tokens(sampling) for r in requests)
        self.make_room(max(lengths, default=0))
        require_context_room(requests, sampling, *self.limits)
        if sampling.temperature < (coldest := VllmSpec.min_temperature):
            raise SpecError(
                f"temperature is {sampling.temperature:g}, but vLLM's minimum is {coldest:g}: use "
                "top_k: 1 to take the most likely tokens"
            )
        rows = [(r.context, seed, r.limit_tokens(sampling)) for r in requests for seed in r.seeds]
        completions = self._generate_rows(rows, sampling) if rows else []
        if self.on_ended is not None:
            self.on_ended(len(rows))
        require_finite_logits(logprobs for _, logprobs, _ in completions)
        ready = (Completion(tuple(t), tuple(p), reason) for t, p, reason in completions)
        return [tuple(next(ready) for _ in request.seeds) for request in requests]

    def _generate_rows(self, rows: Sequence[Row], sampling: TurnSpec) -> list[Any]:
        """Returns tokens, log-probabilities and finish reason of every row."""
        if not self.holds_weights:
            self._load_published_weights()
        settings = sampling.model_dump(mode="json", exclude={"template", "spans"})
        request = {"ask": "generate", "rows": rows, "sampling": settings}
        return list(self._ask(request, "sample")["rows"])

    def _ask(self, message: Mapping[str, Any], doing: str) -> dict[str, Any]:
        """Sends a request to the worker; if it was killed, restarts it and tries once more."""
        load = message["ask"] == "load"
        try:
            return self._worker.ask(message, doing, self._weights if load else None)
        except WorkerGone as gone:
            print(f"{gone}; restarting it", file=sys.stderr, flush=True)
        self.restarts += 1
        self.holds_weights = True
        self._worker, _ = self._start_worker()
        try:
            loaded = self._worker.ask({"ask": "load"}, "take the learner's weights", self._weights)
            return loaded if load else self._worker.ask(message, doing)
        except WorkerGone as gone:
            raise RlxError(
                f"{gone} for the second time, when asked to {doing}: if the machine ran out of "
                "memory, lower sampler.kv_cache_mb or sampler.max_rows"
            ) from gone

    def close(self) -> None:
        """Stops the worker."""
        self._worker.close()
        if self._weights is not None:
            self._weights.close()


def collect_weights(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies weights to the host's memory as they come, so that of weights that ranks gather no
    more than one is whole at a time."""
    copies = {}
    for name, weight in weights:
        # Copies, since the learner continues and a replaced worker needs the same version.
        copies[name] = weight.detach().to("cpu", dtype, copy=True).contiguous()
        del weight
    return copies


def drop_tied_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights that have no memory in common, each under its first name."""
    names: dict[int, str] = {}
    for name, weight in weights.items():
        names.setdefault(weight.data_ptr(), name)
    return {name: weights[name].detach() for name in names.values()}


class WeightFile:
    """One version of all weights as an open file, kept until the next version.

    It is unlinked as soon as it is open, and only its descriptor is sent: a killed process leaves
    nothing behind.

    Args:
        weights: tied weights may be listed once or twice.
        folders: a temporary folder and one in shared memory, which is used if it has room.
    """

    def __init__(self, weights: Mapping[str, Tensor], folders: tuple[Path, Path]) -> None:
        own = {name: weight.contiguous() for name, weight in drop_tied_weights(weights).items()}
        need = 2 * sum(weight.nbytes for weight in own.values())
        shared = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > need
        folder = folders[shared]
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / "model.safetensors"
        try:
            save_file(own, path)
            self._file = path.open("rb")
        finally:
            path.unlink(missing_ok=True)

    def send(self, end: Connection) -> None:
        """Sends the open file to a worker that waits for it."""
        reduction.send_handle(end, self._file.fileno(), 0)

    def close(self) -> None:
        """Gives the file's memory back, once no worker has it open."""
        self._file.close()


class WorkerGone(Exception):
    """The worker process ended without an answer."""


class WorkerProcess:
    """A worker process and the pipe to it, which closes when this process ends for any reason; its
    folders are removed then."""

    def __init__(self, environment: Mapping[str, str], folders: Sequence[Path]) -> None:
        self._end, theirs = Pipe()
        self._folders = folders
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno()), *map(str, folders)],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )

    def ask(
        self, message: Mapping[str, Any], doing: str, weights: WeightFile | None = None
    ) -> dict[str, Any]:
        """Sends a message, and weights after it, and waits for the answer.

        Raises:
            WorkerGone: the worker is dead.
            RlxError: the worker failed and has ended.
        """
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                # A worker that fails may say why, and end, before it has read all of this.
                send_message(self._end, message)
                if weights is not None:
                    weights.send(self._end)
            answer = receive_message(self._end)
        except (EOFError, OSError) as error:
            self.close()
            raise WorkerGone(
                f"the vLLM worker, process {self._process.pid}, ended with exit code "
                f"{self._process.returncode}"
            ) from error
        if "error" in answer:
            self.close()
            raise RlxError(
                f"vLLM could not {doing}: {escape_unprintable(answer['error'])}; the full error is "
                "in the run's log; set sampler.engine: transformers to sample without vLLM"
            )
        return answer

    def close(self) -> None:
        """Waits for the process to exit, and kills it if it does not."""
        self._end.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self._process.kill()
        self._process.wait()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def build_worker_environment(threads: int, device: torch.device) -> dict[str, str]:
    """Returns the worker's environment: the rank's GPU, one process, no network, little logging.

    On a CPU nothing is compiled: for one small function of its own vLLM would have every worker
    call a C++ compiler, for more seconds than all else takes.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(RANK_VARIABLES)}
    by_device = {"TORCH_COMPILE_DISABLE": "1"}
    if device.type == "cuda":
        number, visible = device.index or 0, os.environ.get("CUDA_VISIBLE_DEVICES")
        gpu = visible.split(",")[number] if visible else str(number)
        by_device = {**SAME_RUNNER, "CUDA_VISIBLE_DEVICES": gpu}
    return (
        inherited
        | by_device
        | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_LEVEL": "ERROR" if device.type == "cpu" else "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
    )
