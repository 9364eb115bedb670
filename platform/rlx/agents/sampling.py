"""Samples rollout trees as the programs of agents ask for their turns, from one thread: it starts
programs, waits until those that run wait for the model, and samples their turns together."""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlx.agents.endpoint import AgentEndpoint, TurnOutcome, TurnQueue
from rlx.agents.programs import ProgramRunner, ProgramStarter
from rlx.agents.requests import AgentRequests
from rlx.plugin import Problem
from rlx.rollout import (
    Completion,
    CompletionRequest,
    Dialogue,
    EnvironmentPlan,
    RolloutRecorder,
    RolloutTree,
    SamplingSession,
    build_agent_tree,
)
from rlx.seeding import derive_seed
from rlx.serving import ServedModel, ServedPolicy
from rlx.spec import AgentRolloutSpec
from rlx.stopwatch import Stopwatch
from rlx.text import escape_unprintable

MODEL = "policy"
"""Name of the model in responses; requests may name any."""
MOST_REFUSED = 100
"""Requests of a program that are refused before it is ended."""
_LONGEST_LOOK = 0.05
"""Longest time between two looks at running programs, in seconds."""


@dataclass(slots=True, eq=False)
class _Rollout:
    """A rollout of a problem, and its program: `key` is of its address, `seconds` are those in
    which it did not wait for the model."""

    tree: int
    requests: AgentRequests
    key: str = ""
    seconds: float = 0.0
    is_killed: bool = False

    @property
    def recorder(self) -> RolloutRecorder:
        return self.requests.recorder


class AgentHost:
    def __init__(
        self, spec: AgentRolloutSpec, policy: ServedPolicy, starter: ProgramStarter
    ) -> None:
        self._spec, self._policy, self._starter = spec, policy, starter

    def sample_trees(
        self,
        plan: EnvironmentPlan,
        problems: Sequence[Problem],
        seeds: Sequence[int],
        session: SamplingSession,
        dialogue: Dialogue,
    ) -> list[RolloutTree]:
        if not problems:
            return []
        model = ServedModel(MODEL, self._policy, session.context_length)
        openings = [plan.opening(problem, dialogue) for problem in problems]
        rollouts = [
            _Rollout(
                tree,
                AgentRequests(
                    model,
                    RolloutRecorder(plan, openings[tree], seeds[tree], place, model.context_length),
                ),
            )
            for tree in range(len(problems))
            for place in range(plan.count)
        ]
        queue = TurnQueue()
        ended: deque[tuple[int, str | None]] = deque()

        def note_end(number: int, fault: str | None) -> None:
            with queue.changed:
                ended.append((number, fault))
                queue.changed.notify()

        with (
            AgentEndpoint(queue) as endpoint,
            ProgramRunner(self._spec, self._starter, note_end) as runner,
        ):
            loop = _SamplingLoop(self._spec, plan, queue, endpoint, runner, session, dialogue)
            loop.run(rollouts, problems, ended)
        faults = [r.recorder.fault for r in rollouts if r.recorder.fault is not None]
        if faults:
            first = escape_unprintable(faults[0])
            sys.stderr.write(
                f"{len(faults)} of {len(rollouts)} agents failed, the first: {first}\n"
            )
        return [
            build_agent_tree(problem, [r.recorder for r in rollouts if r.tree == tree])
            for tree, problem in enumerate(problems)
        ]


@dataclass(slots=True)
class _SamplingLoop:
    spec: AgentRolloutSpec
    plan: EnvironmentPlan
    queue: TurnQueue
    endpoint: AgentEndpoint
    runner: ProgramRunner
    session: SamplingSession
    dialogue: Dialogue
    calls: int = 0
    running: dict[int, _Rollout] = field(default_factory=dict)

    def run(
        self,
        rollouts: Sequence[_Rollout],
        problems: Sequence[Problem],
        ended: deque[tuple[int, str | None]],
    ) -> None:
        """Runs the programs of all rollouts; those that are over are in `ended`, under the queue's
        lock."""
        look = min(_LONGEST_LOOK, self.spec.deadline / 4)
        own, waited = Stopwatch(2 * look), Stopwatch(2 * look)
        left = deque(enumerate(rollouts))
        while left or self.running:
            with self.queue.changed:
                while ended:
                    self._end_program(*ended.popleft())
                while left and len(self.running) < self.spec.programs:
                    number, rollout = left.popleft()
                    self._start_program(number, rollout, problems[rollout.tree])
                passed = own.skip()
                self._end_late_programs(passed)
                if not self.queue.waiting:
                    waited.restart()
                batch = self._take_batch(waited.look())
                if not batch and (self.running and not ended):
                    self.queue.changed.wait(look)
            if batch:
                self._sample(batch)
                own.skip()

    def _start_program(self, number: int, rollout: _Rollout, problem: Problem) -> None:
        rollout.key = self.queue.add_agent(rollout.requests)
        recorder = rollout.recorder
        shown = {
            "id": problem.id,
            "prompt": problem.prompt,
            "fields": dict(problem.fields),
            "place": recorder.place,
            "seed": derive_seed(recorder.seed, "environment", recorder.place),
        }
        self.running[number] = rollout
        address = self.endpoint.locate(rollout.key)
        self.runner.start(number, shown, address, rollout.key)

    def _end_program(self, number: int, fault: str | None) -> None:
        rollout = self.running.pop(number)
        del self.queue.agents[rollout.key]
        for outcome in [one for one in self.queue.waiting if one.agent is rollout.requests]:
            outcome.abandon()
        recorder = rollout.recorder
        if recorder.fault is not None or rollout.requests.is_over:
            return
        if fault is not None:
            recorder.fault = fault
        elif not recorder.turns:
            recorder.fault = "it made no request that could be answered"

    def _end_late_programs(self, passed: float) -> None:
        """Counts the time of programs that do not wait for the model, and kills the late and the
        nagging."""
        waiting = {id(outcome.agent) for outcome in self.queue.waiting}
        for number, rollout in self.running.items():
            if id(rollout.requests) not in waiting:
                rollout.seconds += passed
            is_late = rollout.seconds > self.spec.deadline
            if rollout.is_killed or not (is_late or rollout.requests.refused > MOST_REFUSED):
                continue
            if not rollout.requests.is_over and rollout.recorder.fault is None:
                rollout.recorder.fault = (
                    f"deadline of {self.spec.deadline:g} s passed"
                    if is_late
                    else f"more than {MOST_REFUSED} of its requests could not be answered"
                )
            rollout.is_killed = True
            self.runner.kill(number)

    def _take_batch(self, waited: float) -> list[TurnOutcome]:
        """All requests, once every running program waits for the model or patience has ended; in an
        order that does not depend on when they came."""
        waiting = {id(outcome.agent) for outcome in self.queue.waiting}
        busy = any(id(rollout.requests) not in waiting for rollout in self.running.values())
        patience = self.spec.patience
        if not self.queue.waiting or (busy and (patience is None or waited < patience)):
            return []
        order = {id(rollout.requests): number for number, rollout in self.running.items()}
        batch, self.queue.waiting = self.queue.waiting, []
        return sorted(
            batch,
            key=lambda one: (order[id(one.agent)], one.request.context.whole, one.request.numbers),
        )

    def _sample(self, batch: Sequence[TurnOutcome]) -> None:
        groups = self._group_requests(batch)
        continued = [group[0].request.context.turn for group in groups]
        # A session goes on from its last call alone.
        extends = [
            None if turn is None or turn.order[0] != self.calls else turn.order[1]
            for turn in continued
        ]
        keeps = None not in extends
        requests = [
            self._join_requests(group, number if keeps else None)
            for group, number in zip(groups, extends, strict=True)
        ]
        completions = self.session.generate(requests, self.plan.turn)
        self.calls += 1
        first = 0
        with self.queue.changed:
            for group, sampled in zip(groups, completions, strict=True):
                ready = iter(sampled)
                for outcome in group:
                    own = [next(ready) for _ in outcome.request.numbers]
                    self._answer(outcome, own, first)
                    first += len(own)

    def _group_requests(self, batch: Sequence[TurnOutcome]) -> list[list[TurnOutcome]]:
        """Groups requests with the same context and limit: those that open a dialogue by problem,
        others by the turn that they continue."""
        trees = {id(rollout.requests): rollout.tree for rollout in self.running.values()}
        groups: dict[tuple[object, ...], list[TurnOutcome]] = {}
        for outcome in batch:
            context, limit = outcome.request.context, outcome.request.max_new_tokens
            opens = (trees[id(outcome.agent)], context.whole)
            key = (limit, *(opens if context.turn is None else (id(context),)))
            groups.setdefault(key, []).append(outcome)
        return list(groups.values())

    def _join_requests(
        self, group: Sequence[TurnOutcome], extends: int | None
    ) -> CompletionRequest:
        own = [outcome.request for outcome in group]
        limit = own[0].max_new_tokens
        return CompletionRequest(
            own[0].context.whole,
            extends,
            tuple(seed for each in own for seed in each.seeds),
            is_last=all(each.is_last for each in own),
            max_new_tokens=limit if limit < self.plan.turn.max_new_tokens else None,
            is_abandoned=lambda: all(outcome.is_abandoned() for outcome in group),
        )

    def _answer(self, outcome: TurnOutcome, completions: Sequence[Completion], first: int) -> None:
        recorder, request = outcome.agent.recorder, outcome.request
        if outcome.is_abandoned():
            recorder.withdraw(request)
            return
        order = (self.calls, first)
        outcome.set_result(recorder.record(request, completions, self.dialogue, order))
