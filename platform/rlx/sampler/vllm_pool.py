"""Samples with a pool of vLLM servers apart from the learner, which several ranks share.

Every rank asks all servers. The rows of a request are cut into parts of equal size, in order, so
that rows with one context stay together; which server gets a part depends on the rank alone. If a
server ends, what it was asked is asked of the one that replaces it. The answers stay the same,
since every row has its own seed.

New weights do not wait for rows that are being generated: every server takes them between two
tokens, and says which version sampled which token. A request is answered with the weights that the
servers have when it is made, or later ones. A run that wants its numbers to repeat therefore sends
weights while nothing is asked.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlx.model import Policy, StoredForm
from rlx.sampler.drift import SamplerDrift
from rlx.sampler.machine_pool import MachinePool
from rlx.sampler.server_pool import ADAPT, LOAD
from rlx.sampler.transfer import collect_weights, drop_tied_weights
from rlx.sampler.vllm_engine import require_vllm
from rlx.sampler.vllm_keeper import print_line
from rlx.sampler.vllm_session import Row, VllmSession, build_row_request
from rlx.spec import RunnerSpec, TurnSpec
from rlx.spec import VllmSamplerSpec as VllmSpec

__all__ = ["PoolSampler", "split_evenly"]

T = TypeVar("T")

AT_ONCE = 16
"""Requests that a rank makes at once: those of every step in flight, and its own."""


class PoolSampler:
    """Samples completions with all servers of the pool of the rank's machine.

    Args:
        policy: provides the configuration, tokenizer and initial weights; not kept.
        spec: the `sampler:` section, which has a pool.
        runner: precision, and threads of each server.
        device: device of the rank.

    Attributes:
        description: how it computes, and how LoRA adapters arrive.
        limits: maximum dialogue length of the model, and the one that fits into the KV cache of
            every server, both in tokens.
        takes_adapter: whether it takes LoRA adapters beside the weights.
        servers: number of servers.
        drift: as for `rlx.sampler.SamplingEngine`.

    Raises:
        EnvironmentFault: vLLM is not installed, or there are too few GPUs.
        RlxError: vLLM cannot run this model here.
        ConnectionError: the servers are lost.
    """

    def __init__(
        self, policy: Policy, spec: VllmSpec, runner: RunnerSpec, device: torch.device
    ) -> None:
        require_vllm()
        assert spec.pool is not None
        self.drift: SamplerDrift | None = None
        self.servers = spec.pool.servers
        self._version, self._dtype = 0, getattr(torch, runner.dtype)
        self._step: int | None = None
        self._steps: dict[int, int] = {}
        self._tells_ages = False
        self._stored = StoredForm(policy.model)
        self._pool = MachinePool(policy, spec, runner, device)
        self._threads = ThreadPoolExecutor(self.servers * AT_ONCE)
        self._rows, self._lock = [0] * self.servers, Lock()
        try:
            facts = self._pool.describe()
            longest = min(one.longest for one in facts)
            self.limits = policy.context_length, longest
            self.takes_adapter: bool = all(one.takes_adapter for one in facts)
            refusals = [one.refusal for one in facts if one.refusal]
            self.description = self._describe(policy, spec, *refusals[:1])
            self.load(dict(policy.model.named_parameters()))
        except BaseException:
            self.close()
            raise
        # The longer parts of two ranks go to different servers.
        first = int(os.environ.get("LOCAL_RANK", 0)) % self.servers
        self._asked = [*range(first, self.servers), *range(first)]

    def _describe(self, policy: Policy, spec: VllmSpec, refusal: str | None = None) -> str:
        assert spec.pool is not None
        count, parts = self.servers, spec.pool.tensor_parallel
        words = [f"vLLM in a pool of {count} server{'s' * (count > 1)}"]
        if parts > 1:
            words[0] += f", each over {parts} devices"
        words[0] += f", {self._pool.place}"
        if policy.lora is not None and self.takes_adapter:
            words.append("LoRA adapters are swapped")
        elif policy.lora is not None:
            words.append(
                f"LoRA adapters are merged, not swapped ({refusal})"
                if refusal
                else "LoRA adapters are merged: sampler.adapters is merge"
            )
        return "; ".join(words)

    @property
    def context_length(self) -> int:
        """Maximum dialogue length, in tokens."""
        return min(self.limits)

    @property
    def restarts(self) -> int:
        """How often a server was replaced; 0 on all ranks but the one that sends weights."""
        return self._pool.restarts

    def make_room(self, length: int) -> None:
        """Does nothing: servers have all the room that their devices have."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sends the learner's weights to the servers; tied weights may be listed twice. See
        `load_each`."""
        self.load_each(iter(drop_tied_weights(weights).items()))

    def load_each(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Sends the learner's weights to the servers, by name; an adapter that was loaded before is
        dropped. They are collected in the host's memory, and by the rank alone that sends them.

        Raises:
            RlxError: vLLM cannot load them, or a server has ended too often.
        """
        self.drift = None
        if self._pool.publishes:
            kept = self._stored.convert(self._collect(weights))
            self._pool.publish(LOAD, self._version + 1, kept)
        else:
            deque(weights, maxlen=0)  # whose parts the ranks gather together
        self._end_version()

    def load_adapter(self, weights: Mapping[str, Tensor]) -> None:
        """Sends a LoRA adapter to the servers, in place of the one before; see `load_each`."""
        self.drift = None
        if self._pool.publishes:
            kept = self._collect(iter(weights.items()))
            self._pool.publish(ADAPT, self._version + 1, kept)
        self._end_version()

    def _collect(self, weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return collect_weights("file", weights, self._dtype, torch.device("cpu"))

    def name_weights(self, step: int, *, are_new: bool = True) -> None:
        """See `rlx.sampler.name_weights`."""
        self._step = step
        if are_new:
            self._steps.setdefault(self._version, step)
        # Before they are sent: rows may end with them before this rank has sent them all.
        self._steps[self._version + are_new] = step

    def _end_version(self) -> None:
        """Counts weights when they have been sent: requests want none that may never come."""
        self._version += 1
        if self._step is not None:
            self._steps[self._version + 1] = self._step  # an adapter may follow

    @property
    def steps(self) -> Mapping[int, int]:
        """See `rlx.sampler.vllm_session.RowSampler`."""
        return self._steps if self._tells_ages else {}

    def tell_ages(self) -> None:
        """See `rlx.sampler.tell_ages`."""
        self._tells_ages = True

    @contextmanager
    def session(self) -> Iterator[VllmSession]:
        """Opens a session."""
        yield VllmSession(self)

    def generate(self, rows: list[Row], sampling: TurnSpec) -> list[Any]:
        """See `rlx.sampler.vllm_session.RowSampler`."""

        def ask(number: int, part: list[Row]) -> list[Any]:
            message = {**build_row_request(part, sampling), "version": self._version}
            completed = list(self._pool.ask(number, message)["rows"]) if part else []
            with self._lock:
                self._rows[number] += len(completed)
            return completed

        answers = self._threads.map(ask, self._asked, split_evenly(rows, self.servers))
        return [row for answer in answers for row in answer]

    def close(self) -> None:
        """Leaves the pool, which ends with the rank that sends it weights."""
        if self._pool.publishes:
            counts = ", ".join(f"{rows:,}" for rows in self._rows)
            print_line(f"rows by vLLM server, of this rank: {counts}")
        self._pool.close()
        # Others wait for no answer that they do not need.
        self._threads.shutdown(wait=self._pool.publishes)


def split_evenly(items: Sequence[T], parts: int) -> list[list[T]]:
    """Cuts items into parts whose sizes differ by at most one, in order."""
    cuts = [len(items) * part // parts for part in range(parts + 1)]
    return [list(items[start:stop]) for start, stop in pairwise(cuts)]
