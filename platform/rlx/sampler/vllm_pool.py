"""Samples with a pool of vLLM servers apart from the learner, which all ranks of a machine share.

The first rank of a machine keeps the servers (`rlx.sampler.vllm_keeper`). Every rank asks all of
them, over sockets in a folder that its machine's ranks share. The rows of a request are cut into
parts of equal size, in order, so that rows with one context stay together; which server gets a part
depends on the rank alone. If a server ends, what it was asked is asked of the one that replaces it.
The answers stay the same, since every row has its own seed.
"""

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlx.errors import EnvironmentFault, RlxError
from rlx.model import Policy, StoredForm
from rlx.sampler.channel import Channel
from rlx.sampler.drift import SamplerDrift
from rlx.sampler.transfer import SHARED_MEMORY, PublishedWeights, publish_weights
from rlx.sampler.vllm_engine import require_vllm
from rlx.sampler.vllm_keeper import FAILURE, PoolKeeper, get_socket
from rlx.sampler.vllm_process import build_worker_environment, select_pool_gpus
from rlx.sampler.vllm_session import Row, VllmSession, build_row_request
from rlx.sampler.vllm_settings import ModelFiles, build_worker_settings
from rlx.spec import RunnerSpec, TurnSpec
from rlx.spec import VllmSamplerSpec as VllmSpec

__all__ = ["PoolSampler", "split_evenly"]

T = TypeVar("T")

SOCKET_PATH = 107
"""Maximum length of a socket's path on Linux, in bytes."""
LOOK = 0.1
"""Seconds between two attempts to reach a server that is being started."""
GONE = 10.0
"""Seconds without a pool's folder after which a rank ends: the first one has said why by then."""


class PoolSampler:
    """Samples completions with all servers of its machine's pool.

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
    """

    def __init__(
        self, policy: Policy, spec: VllmSpec, runner: RunnerSpec, device: torch.device
    ) -> None:
        require_vllm()
        assert spec.pool is not None
        self.drift: SamplerDrift | None = None
        self.servers = spec.pool.servers
        self._version, self._dtype = 0, getattr(torch, runner.dtype)
        self._stored = StoredForm(policy.model)
        rank = int(os.environ.get("LOCAL_RANK", 0))
        self._folders, self._keeps = _name_folders(), rank == 0
        self._keeper: PoolKeeper | None = None
        self._connections = [_Connection(self._folders[0], n) for n in range(self.servers)]
        self._threads = ThreadPoolExecutor(self.servers)
        try:
            if self._keeps:
                self._keeper = self._start_servers(policy, spec, runner, device)
            told = list(self._threads.map(_Connection.reach, self._connections))
            longest: int = min(one["longest"] for one in told)
            self.limits = policy.context_length, longest
            self.takes_adapter: bool = all(one["takes_adapter"] for one in told)
            self.description = self._describe(policy, spec)
            self.load(dict(policy.model.named_parameters()))
        except BaseException:
            self.close()
            raise
        first = rank % self.servers  # the longer parts of two ranks go to different servers
        self._asked = self._connections[first:] + self._connections[:first]

    def _start_servers(
        self, policy: Policy, spec: VllmSpec, runner: RunnerSpec, device: torch.device
    ) -> PoolKeeper:
        assert spec.pool is not None
        gpus = select_pool_gpus(spec.pool, device)
        place, _ = self._folders
        _require_short_path(get_socket(place, self.servers))
        place.mkdir(mode=0o700)
        ModelFiles(policy).write(place)
        common = build_worker_environment(runner, device)
        settings = build_worker_settings(policy, spec, runner, device)
        return PoolKeeper(place, settings, [common | own for own in gpus], device)

    def _describe(self, policy: Policy, spec: VllmSpec) -> str:
        assert spec.pool is not None
        count, parts = self.servers, spec.pool.tensor_parallel
        words = [f"vLLM in a pool of {count} server{'s' * (count > 1)}"]
        if parts > 1:
            words[0] += f", each over {parts} devices"
        if policy.lora is not None and self.takes_adapter:
            words.append("LoRA adapters are swapped")
        elif policy.lora is not None:
            refusal = self._keeper and self._keeper.refusal
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
        """How often a server of this machine was replaced; 0 on all ranks but its first."""
        return self._keeper.restarts if self._keeper else 0

    def make_room(self, length: int) -> None:
        """Does nothing: servers have all the room that their devices have."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sends the learner's weights to the servers; see `load_each`."""
        self.load_each(iter(weights.items()))

    def load_each(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Sends the learner's weights to the servers, by name; an adapter that was loaded before is
        dropped. They are collected in the host's memory, and by the machine's first rank alone.

        Raises:
            RlxError: vLLM cannot load them, or a server has ended too often.
        """
        self._version, self.drift = self._version + 1, None
        if self._keeper is None:
            for _ in weights:  # whose parts the ranks gather together
                pass
            return
        kept = {name: weight.detach().to("cpu", self._dtype) for name, weight in weights}
        self._keeper.load(self._version, self._publish(self._stored.convert(kept)))

    def load_adapter(self, weights: Mapping[str, Tensor]) -> None:
        """Sends a LoRA adapter to the servers, in place of the one before; see `load_each`."""
        self._version, self.drift = self._version + 1, None
        if self._keeper is not None:
            self._keeper.load_adapter(self._version, self._publish(weights))

    def _publish(self, weights: Mapping[str, Tensor]) -> PublishedWeights:
        return publish_weights("file", weights, self._dtype, torch.device("cpu"), self._folders)

    @contextmanager
    def session(self) -> Iterator[VllmSession]:
        """Opens a session."""
        yield VllmSession(self)

    def generate(self, rows: list[Row], sampling: TurnSpec) -> list[Any]:
        """See `rlx.sampler.vllm_session.RowSampler`."""

        def ask(server: _Connection, part: list[Row]) -> list[Any]:
            message = {**build_row_request(part, sampling), "version": self._version}
            completed = list(server.ask(message)["rows"]) if part else []
            server.rows += len(completed)
            return completed

        answers = self._threads.map(ask, self._asked, split_evenly(rows, self.servers))
        return [row for answer in answers for row in answer]

    def close(self) -> None:
        """Leaves the pool; the machine's first rank stops it."""
        for connection in self._connections:
            connection.close()
        if self._keeper is not None:
            counts = ", ".join(f"{one.rows:,}" for one in self._connections)
            print(f"rows by vLLM server, of this machine's first rank: {counts}", flush=True)
            self._keeper.close()
        self._threads.shutdown(wait=self._keeps)  # others wait for no answer that they do not need
        for folder in self._folders if self._keeps else ():
            shutil.rmtree(folder, ignore_errors=True)


def split_evenly(items: Sequence[T], parts: int) -> list[list[T]]:
    """Cuts items into parts whose sizes differ by at most one, in order."""
    cuts = [len(items) * part // parts for part in range(parts + 1)]
    return [list(items[start:stop]) for start, stop in pairwise(cuts)]


def _name_folders() -> tuple[Path, Path]:
    """The pool's folder, the same on all ranks of this machine, and one in shared memory, where all
    users write, under a name that none of them can guess.

    Ranks of one attempt have a temporary folder of their own, after which their supervisor sweeps.
    """
    temporary, token = Path(tempfile.gettempdir()), secrets.token_hex(4)
    is_alone = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == 1
    pool = temporary / f"rlx-vllm-{token if is_alone else 'pool'}"
    return pool, SHARED_MEMORY / f"{temporary.name}-rlx-vllm-{token}"


def _require_short_path(path: Path) -> None:
    """Checks that a socket can have this path.

    Raises:
        EnvironmentFault: it is too long.
    """
    if (over := len(os.fsencode(path)) - SOCKET_PATH) > 0:
        raise EnvironmentFault(
            f"sampler.pool needs sockets in the temporary folder, whose path is {over} characters "
            "too long: set TMPDIR to a shorter one"
        )


class _Connection:
    """The connection to one server of the pool in a folder, whichever process it is.

    Attributes:
        rows: how many rows it has completed for this rank.
    """

    def __init__(self, place: Path, number: int) -> None:
        self._place, self._number, self.rows = place, number, 0
        self._channel: Channel | None = None
        self._is_closed = False

    def reach(self) -> dict[str, Any]:
        """Connects, as soon as the server is there; returns what it says of itself.

        Raises:
            RlxError: the pool has failed, or this rank has left it.
            ConnectionError: the machine's first rank has left it.
        """
        was_there, missed = self._channel is not None, 0.0
        while not self._is_closed:
            if (failure := self._place / FAILURE).exists():
                raise RlxError(failure.read_text())
            with suppress(EOFError, OSError):
                address = str(get_socket(self._place, self._number))
                self._channel = Channel(Client(address, "AF_UNIX"))
                if not self._is_closed:  # `close` ends this exchange from now on
                    return self._channel.receive()
            time.sleep(LOOK)
            missed += LOOK if was_there and not self._place.exists() else 0
            if missed > GONE:
                raise ConnectionError("this machine's first rank has left the pool of vLLM servers")
        raise RlxError("this rank has left the pool of vLLM servers")

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message and waits for the answer; asks again if the server was replaced.

        Raises:
            RlxError: the pool has failed, or this rank has left it.
            ConnectionError: the machine's first rank has left it.
        """
        while True:
            channel = self._channel
            assert channel is not None
            try:
                channel.send(message)
                return channel.receive()
            except (EOFError, OSError):
                channel.close()
            if not self._is_closed:
                print(
                    f"vLLM server {self._number} has not answered {len(message['rows'])} rows: "
                    "they are asked again of the one that replaces it",
                    file=sys.stderr,
                    flush=True,
                )
            self.reach()

    def close(self) -> None:
        """Closes the connection for good, also for a thread that waits for an answer."""
        self._is_closed = True
        if self._channel is not None:
            self._channel.hang_up()
