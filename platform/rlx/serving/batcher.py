"""Samples what many requests ask for together, in a thread of its own."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Condition, Thread
from typing import Generic, Self, TypeVar

from rlx.rollout import Completion, CompletionRequest
from rlx.sampler import SamplingEngine, SequenceLogprobs
from rlx.spec import TurnSpec


class QueueFullError(Exception): ...


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """A completion, without tokens where none were asked for, of a context, with the
    log-probabilities of both if these were asked for."""

    context: tuple[int, ...]
    completion: Completion
    logprobs: SequenceLogprobs | None


@dataclass(frozen=True, slots=True)
class SamplingJob:
    """The completions that one request asks for.

    Attributes:
        requests: contexts, each with the seeds and the maximum length of its completions; with the
            maximum 0 nothing is sampled.
        sampling: its `max_new_tokens` is that of the longest request.
        likeliest: number of likeliest tokens at each place; None without log-probabilities.
    """

    requests: tuple[CompletionRequest, ...]
    sampling: TurnSpec
    likeliest: int | None

    @property
    def rows(self) -> int:
        return sum(len(request.seeds) for request in self.requests)

    def samples_like(self, other: "SamplingJob") -> bool:
        update = {"max_new_tokens": self.sampling.max_new_tokens}
        return self.sampling == other.sampling.model_copy(update=update)


T = TypeVar("T")


class Outcome(Future[T], Generic[T]):
    """What becomes of what a client waits for."""

    _abandoned = False

    def abandon(self) -> None:
        """Says that nobody waits for it any more; without effect if it is done."""
        self._abandoned = True
        self.cancel()

    def is_abandoned(self) -> bool:
        return self._abandoned


SampledGroups = list[tuple[SampledCompletion, ...]]
"""For each request of a job one completion per seed, in order."""
JobOutcome = Outcome[SampledGroups]
_Batch = Sequence[tuple[SamplingJob, JobOutcome]]


class Batcher:
    """A bounded queue of jobs, and the thread that samples them.

    The next batch is the oldest of the waiting jobs with all those that are sampled with the same
    settings. Every completion has a seed of its own, so that it does not depend on its batch.

    Args:
        engine: used by the thread alone while the batcher is open.
        max_rows: completions sampled together.
        places: maximum number of completions of all jobs that wait or are sampled.
    """

    def __init__(self, engine: SamplingEngine, *, max_rows: int, places: int) -> None:
        self._engine, self._max_rows, self.places = engine, max_rows, places
        self._waiting: deque[tuple[SamplingJob, JobOutcome]] = deque()
        self._sampled: list[tuple[SamplingJob, JobOutcome]] = []
        self.taken = 0
        self._changed = Condition()
        self._is_closed = False
        self._thread = Thread(target=self._run, name="rlx-batcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._is_closed = True
            left = [outcome for _, outcome in (*self._waiting, *self._sampled)]
            self._changed.notify()
        for outcome in left:
            outcome.abandon()
        self._thread.join()

    def submit(self, job: SamplingJob) -> JobOutcome:
        """Queues a job, or raises QueueFullError; to abandon its outcome gives its place back."""
        outcome: JobOutcome = Outcome()
        with self._changed:
            if self._is_closed or self.taken + job.rows > self.places:
                raise QueueFullError(
                    f"{self.taken} of {self.places} places are taken, and this request needs "
                    f"{job.rows}: repeat it later"
                )
            self.taken += job.rows
            self._waiting.append((job, outcome))
            self._changed.notify()
        outcome.add_done_callback(lambda _: self._leave(job, outcome))
        return outcome

    def _leave(self, job: SamplingJob, outcome: JobOutcome) -> None:
        with self._changed:
            self.taken -= job.rows
            if outcome.cancelled():
                self._waiting = deque(pair for pair in self._waiting if pair[1] is not outcome)

    def _run(self) -> None:
        while batch := self._take_batch():
            self._answer(batch)

    def _answer(self, batch: _Batch) -> None:
        """Samples a batch; if that fails, its jobs one by one, so that one fails no others."""
        try:
            sampled = self._sample(batch)
        except Exception as error:  # noqa: BLE001  (the request is answered with it)
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for one in batch:
                self._answer([one])
        else:
            for (_, outcome), found in zip(batch, sampled, strict=True):
                outcome.set_result(found)

    def _take_batch(self) -> list[tuple[SamplingJob, JobOutcome]]:
        """Waits for jobs, and takes those of the next batch; empty once the batcher is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return []
                chosen: list[tuple[SamplingJob, JobOutcome]] = []
                waiting: deque[tuple[SamplingJob, JobOutcome]] = deque()
                rows = 0
                oldest = self._waiting[0][0]
                for job, outcome in self._waiting:
                    fits = not chosen or rows + job.rows <= self._max_rows
                    if not (fits and job.samples_like(oldest)):
                        waiting.append((job, outcome))
                    elif outcome.set_running_or_notify_cancel():
                        chosen.append((job, outcome))
                        rows += job.rows
                self._waiting, self._sampled = waiting, chosen
                if chosen:
                    return chosen

    def _sample(self, batch: _Batch) -> list[SampledGroups]:
        requests = [
            replace(request, is_abandoned=outcome.is_abandoned)
            for job, outcome in batch
            for request in job.requests
        ]
        completions = self._generate(requests, batch[0][0].sampling)
        jobs = [replace(job, likeliest=None) if o.is_abandoned() else job for job, o in batch]
        logprobs = iter(self._compute_logprobs(jobs, completions))
        ready = iter(zip(requests, completions, strict=True))
        return [
            [
                tuple(
                    SampledCompletion(
                        request.context, one, None if job.likeliest is None else next(logprobs)
                    )
                    for one in group
                )
                for request, group in (next(ready) for _ in job.requests)
            ]
            for job in jobs
        ]

    def _generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        wanted = [request for request in requests if request.max_new_tokens != 0]
        groups, empty = iter(list[tuple[Completion, ...]]()), Completion((), (), "length")
        if wanted:
            longest = max(request.max_new_tokens or 0 for request in wanted)
            limited = sampling.model_copy(update={"max_new_tokens": longest})
            with self._engine.session() as session:
                groups = iter(session.generate(wanted, limited))
        return [
            next(groups) if request.max_new_tokens != 0 else (empty,) * len(request.seeds)
            for request in requests
        ]

    def _compute_logprobs(
        self, jobs: Sequence[SamplingJob], completions: Sequence[tuple[Completion, ...]]
    ) -> Iterator[SequenceLogprobs]:
        asked: list[tuple[int, tuple[int, ...]]] = []
        groups = iter(completions)
        for job in jobs:
            for request in job.requests:
                for one in next(groups):
                    if job.likeliest is not None:
                        asked.append((job.likeliest, request.context + one.token_ids))
        if not asked:
            return
        most = max(likeliest for likeliest, _ in asked)
        found = self._engine.compute_logprobs([ids for _, ids in asked], most)
        for (likeliest, _), each in zip(asked, found, strict=True):
            yield SequenceLogprobs(each.logprobs, tuple(at[:likeliest] for at in each.likeliest))
