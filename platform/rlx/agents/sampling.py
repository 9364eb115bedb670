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
        room = model.context_length
        agents = [
            AgentRequests(
                model, RolloutRecorder(plan, openings[tree], seeds[tree], place, room), tree
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
            loop.run(agents, problems, ended)
        faults = [a.recorder.fault for a in agents if a.recorder.fault is not None]
        if faults:
            first = escape_unprintable(faults[0])
            sys.stderr.write(f"{len(faults)} of {len(agents)} agents failed, the first: {first}\n")
        return [
            build_agent_tree(problem, [a.recorder for a in agents if a.tree == tree])
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
    running: dict[int, AgentRequests] = field(default_factory=dict)

    def run(
        self,
        agents: Sequence[AgentRequests],
        problems: Sequence[Problem],
        ended: deque[tuple[int, str | None]],
    ) -> None:
        """Runs the programs of all rollouts; those that are over are in `ended`, under the queue's
        lock."""
        look = min(_LONGEST_LOOK, self.spec.deadline / 4)
        own, waited = Stopwatch(2 * look), Stopwatch(2 * look)
        left = deque(enumerate(agents))
        while left or self.running:
            with self.queue.changed:
                while ended:
                    self._end_program(*ended.popleft())
                while left and len(self.running) < self.spec.programs:
                    number, agent = left.popleft()
                    self._start_program(number, agent, problems[agent.tree])
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

    def _start_program(self, number: int, agent: AgentRequests, problem: Problem) -> None:
        agent.key = self.queue.add_agent(agent)
        recorder = agent.recorder
        shown = {
            "id": problem.id,
            "prompt": problem.prompt,
            "fields": dict(problem.fields),
            "place": recorder.place,
            "seed": derive_seed(recorder.seed, "environment", recorder.place),
        }
        self.running[number] = agent
        self.runner.start(number, shown, self.endpoint.locate(agent.key), agent.key)

    def _end_program(self, number: int, fault: str | None) -> None:
        agent = self.running.pop(number)
        del self.queue.agents[agent.key]
        for outcome in [one for one in self.queue.waiting if one.agent is agent]:
            outcome.abandon()
        recorder = agent.recorder
        if recorder.fault is not None or agent.is_over:
            return
        if fault is not None:
            recorder.fault = fault
        elif not recorder.turns:
            recorder.fault = "it made no request that could be answered"

    def _end_late_programs(self, passed: float) -> None:
        """Counts the time of programs that do not wait for the model, and kills the late and the
        nagging."""
        waiting = {outcome.agent for outcome in self.queue.waiting}
        for number, agent in self.running.items():
            if agent not in waiting:
                agent.seconds += passed
            is_late = agent.seconds > self.spec.deadline
            if agent.is_killed or not (is_late or agent.refused > MOST_REFUSED):
                continue
            if not agent.is_over and agent.recorder.fault is None:
                agent.recorder.fault = (
                    f"deadline of {self.spec.deadline:g} s passed"
                    if is_late
                    else f"more than {MOST_REFUSED} of its requests could not be answered"
                )
            agent.is_killed = True
            self.runner.kill(number)

    def _take_batch(self, waited: float) -> list[TurnOutcome]:
        """All requests, once every running program waits for the model or patience has ended; in an
        order that does not depend on when they came."""
        waiting = {outcome.agent for outcome in self.queue.waiting}
        busy = any(agent not in waiting for agent in self.running.values())
        patience = self.spec.patience
        if not self.queue.waiting or (busy and (patience is None or waited < patience)):
            return []
        order = {agent: number for number, agent in self.running.items()}
        batch, self.queue.waiting = self.queue.waiting, []
        return sorted(
            batch,
            key=lambda one: (order[one.agent], one.request.context.whole, one.request.numbers),
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
        groups: dict[tuple[object, ...], list[TurnOutcome]] = {}
        for outcome in batch:
            context, limit = outcome.request.context, outcome.request.max_new_tokens
            opens = (outcome.agent.tree, context.whole)
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
