"""Samples multi-turn rollouts with an environment, which answers each turn before the next begins.

Turns that wait for the model are sampled together. In self-play each player's turns are a rollout
of its own, with only what the environment showed to that player: the rollouts of the first player
are one tree, and those of the second another.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlx.errors import SpecError
from rlx.plugin import FAILED, Action, Message, Problem, Step, ToolCall
from rlx.rollout.dialogue import (
    CompletionRequest,
    Dialogue,
    SamplingSession,
    TurnPrompt,
    build_turn_segment,
    encode_opening,
    find_shared_beginning,
    list_example_messages,
)
from rlx.rollout.hosts import EnvironmentHost, HostFault
from rlx.rollout.tools import Schema, limit_calls, list_schemas
from rlx.rollout.tree import NO_PARENT, RolloutTree, Segment
from rlx.seeding import derive_seed
from rlx.spec import (
    AgentRolloutSpec,
    EnvironmentRolloutSpec,
    ForcedAnswer,
    TurnSpec,
)
from rlx.stopwatch import CLOCK, Clock


def derive_turn_seed(seed: int, place: int, number: int, player: int = 0) -> int:
    """Seed of turn `number` of the game `place`, from that of its problem; `player` is 1 for the
    second."""
    return derive_seed(seed, "turn", place, number, *([player] if player else []))


@dataclass(slots=True)
class PlayerRollout:
    """The unfinished rollout of one player: a chain of segments, each the parent of the next.

    Attributes:
        opening: what the player reads before its first turn; None until that is known.
        anchor: name of the state in which its first turn begins.
        context: all tokens so far.
        completion: number of the session's call that sampled its last completion, and the index of
            the completion in it.
        chain: segments after the opening.
    """

    opening: TurnPrompt | None = None
    anchor: str | None = None
    context: tuple[int, ...] = ()
    completion: tuple[int, int] | None = None
    turns: int = 0
    last_turn: tuple[int, ...] = ()
    chain: list[Segment] = field(default_factory=list)

    def open(self, opening: TurnPrompt, anchor: str | None = None) -> None:
        self.opening, self.anchor, self.context = opening, anchor, opening.token_ids

    def find_completion(self, call: int) -> int | None:
        """Returns the index of its last completion in the session's call of that number."""
        made_by, order = self.completion or (None, None)
        return order if made_by == call else None

    def add_turn(self, segment: Segment) -> None:
        self.chain.append(segment)
        self.turns, self.last_turn = segment.turn, segment.token_ids
        self.context += segment.token_ids

    def report(self, info: Mapping[str, Any]) -> None:
        """Adds to the `info` of the player's last turn, if it had any."""
        for at in range(len(self.chain) - 1, -1, -1):
            segment = self.chain[at]
            if segment.author == "policy":
                self.chain[at] = replace(segment, info={**segment.info, **info})
                return


@dataclass(slots=True)
class OngoingGame:
    """An unfinished game.

    Attributes:
        state: state of the environment; None before it is reset and after its end.
        next: the player whose turn is next.
    """

    tree: int
    place: int
    players: tuple[PlayerRollout, ...]
    state: Any = None
    next: int = 0

    @property
    def mover(self) -> PlayerRollout:
        return self.players[self.next]

    def derive_turn_seed(self, seed: int) -> int:
        return derive_turn_seed(seed, self.place, self.mover.turns + 1, self.next)


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn that has no answer yet; `order` is the number of the session's call that sampled it,
    and the index of its completion in it."""

    game: OngoingGame
    segment: Segment
    order: tuple[int, int]
    calls: tuple[ToolCall, ...] = ()


def build_player_trees(problem: Problem, games: Sequence[OngoingGame]) -> Iterator[RolloutTree]:
    """Yields the tree of each player, from all games of one problem."""
    first, *others = zip(*(game.players for game in games), strict=True)
    fields = {**problem.fields, "player": 0} if others else problem.fields
    yield _build_tree(replace(problem, fields=fields), first)
    for player, rollouts in enumerate(others, start=1):
        tree = _build_tree(problem, rollouts)
        yield replace(
            tree,
            problem=replace(
                problem,
                id=f"{problem.id}/player {player}",
                prompt=tree.segments[0].text,
                fields={**problem.fields, "player": player},
            ),
        )


def _build_tree(problem: Problem, rollouts: Sequence[PlayerRollout]) -> RolloutTree:
    """The root has what all openings begin with; the rest of an opening is an observation."""
    openings = [rollout.opening for rollout in rollouts if rollout.opening is not None]
    root = find_shared_beginning(openings)
    segments = [root.to_segment("prompt")]
    for rollout in rollouts:
        chain, parent = rollout.chain, 0
        rest = (
            TurnPrompt("", ()) if rollout.opening is None else rollout.opening.cut_beginning(root)
        )
        if rest.token_ids or rollout.anchor is not None:
            chain = [rest.to_segment("environment", anchor=rollout.anchor), *chain]
        for segment in chain:
            segments.append(replace(segment, parent=parent))
            parent = len(segments) - 1
    return RolloutTree(problem, tuple(segments))


@dataclass(frozen=True, slots=True)
class EnvironmentPlan:
    """How rollouts and an environment, or an agent's program, take turns.

    Attributes:
        count: rollouts per problem.
        turn: sampling settings of every turn; its template opens the first.
        max_turns: maximum number of regular turns.
        forced_answer: an extra turn for rollouts that are not done by then.
        inline: whether observations directly follow a turn, without a message of their own.
        on_error: what to drop if a rollout has a fault.
        system: system message for problems without their own.
        examples: messages before those of every problem.
        players: how many players the policy is: 2 in self-play.
    """

    count: int
    turn: TurnSpec
    max_turns: int
    forced_answer: ForcedAnswer | None
    inline: bool
    on_error: Literal["fail", "drop_sample", "drop_group"]
    system: str = ""
    examples: tuple[Message, ...] = ()
    players: int = 1
    by: Literal["environment", "agent"] = "environment"
    tools: tuple[Schema, ...] = ()

    @property
    def last(self) -> int:
        """Number of the last turn that a rollout may have."""
        return self.max_turns + (self.forced_answer is not None)

    def sampling(self, number: int) -> TurnSpec:
        forced = self.forced_answer
        if number <= self.max_turns or forced is None or forced.max_new_tokens is None:
            return self.turn
        return self.turn.model_copy(update={"max_new_tokens": forced.max_new_tokens})

    def opening(self, problem: Problem, dialogue: Dialogue) -> TurnPrompt:
        turn = self.turn
        return encode_opening(
            *(dialogue, turn.template, problem, self.system),
            examples=self.examples,
            prefix=turn.prefix,
            tools=self.tools,
        )

    def action(self, turn: SampledTurn) -> Action:
        """A sampled turn, as the environment receives it."""
        player = turn.game.next if self.players > 1 else None
        own = turn.segment
        spans = {name: span.text for name, span in own.spans.items()}
        return self.build_action(own.text, spans, own.turn, own.finish_reason, player, turn.calls)

    def read_calls(
        self, dialogue: Dialogue, text: str, context: Sequence[int]
    ) -> tuple[ToolCall, ...]:
        if not self.tools:
            return ()
        return limit_calls(dialogue.read_reply(text, context, self.tools).calls)

    def encode_answer(
        self,
        step: Step,
        calls: Sequence[ToolCall],
        after: Sequence[int],
        number: int,
        dialogue: Dialogue,
    ) -> TurnPrompt:
        """What the policy reads between a turn with these calls, whose tokens are `after`, and its
        next.

        Raises:
            SpecError: the vocabulary has no token for part of it.
        """
        text, prefix = self.build_turn_text(step.observation, number), self.turn.prefix
        if not self.tools:
            return dialogue.encode_observation(text, after, inline=self.inline, prefix=prefix)
        results = list(zip(calls, step.results, strict=True))
        return dialogue.encode_results(results, text, after, self.tools, prefix)

    def build_action(
        self,
        text: str,
        spans: Mapping[str, str],
        number: int,
        finish: str = "stop",
        player: int | None = None,
        calls: tuple[ToolCall, ...] = (),
    ) -> Action:
        return Action(
            text=text,
            spans=spans,
            number=number,
            turns_left=max(0, self.max_turns - number),
            forced=number > self.max_turns,
            finish_reason=finish,
            player=player,
            calls=calls,
        )

    def build_turn_text(self, observation: str, number: int) -> str:
        """The prompt of turn number `number`: an observation, and the order to answer if forced."""
        forced = self.forced_answer
        return observation + (forced.template if forced and number == self.last else "")


def build_talk(
    spec: AgentRolloutSpec | EnvironmentRolloutSpec, *, replayable: bool = True
) -> EnvironmentPlan:
    """Builds the plan of a spec, whose environment may be replayable or not."""
    if isinstance(spec, AgentRolloutSpec):
        return EnvironmentPlan(
            count=spec.num_generations,
            turn=spec.turn,
            max_turns=spec.max_turns,
            forced_answer=None,
            inline=False,
            on_error=spec.on_error,
            system=spec.system,
            examples=list_example_messages(spec),
            by="agent",
        )
    return EnvironmentPlan(
        count=spec.num_generations,
        turn=spec.turn,
        max_turns=spec.max_turns,
        forced_answer=spec.forced_answer,
        inline=spec.observation == "inline",
        on_error=spec.resolve_limits(replayable=replayable).on_error,
        system=spec.system,
        examples=list_example_messages(spec),
        players=spec.players,
        tools=list_schemas(spec.tools),
    )


def sample_conversations(
    plan: EnvironmentPlan,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    session: SamplingSession,
    dialogue: Dialogue,
    host: EnvironmentHost,
    clock: Clock = CLOCK,
) -> list[RolloutTree]:
    """Samples `count` games of every problem.

    A turn's samples depend only on its problem's seed, its game's place among the problem's, its
    player and its number. A rollout that outgrows the model's context ends before the turn that
    does not fit, but not before the first of all.

    Returns:
        Trees in the order of `problems`; in self-play two per problem, one for each player.
    """
    _require_encodable_texts(plan, dialogue)
    games = [
        OngoingGame(t, i, tuple(PlayerRollout() for _ in range(plan.players)))
        for t in range(len(problems))
        for i in range(plan.count)
    ]
    openings = [plan.opening(problem, dialogue) for problem in problems]
    for game in games:
        game.mover.open(openings[game.tree])
    _SamplingLoop(plan, problems, seeds, session, dialogue, host, clock).run(games)
    by_problem: list[list[OngoingGame]] = [[] for _ in problems]
    for game in games:
        by_problem[game.tree].append(game)
    pairs = zip(problems, by_problem, strict=True)
    return [tree for problem, played in pairs for tree in build_player_trees(problem, played)]


@dataclass(slots=True)
class _SamplingLoop:
    """Samples games until all have ended. `asked` are the numbers of those that wait for the
    environment, with their turns, None at the beginning; `ready` those that wait for the model."""

    plan: EnvironmentPlan
    problems: Sequence[Problem]
    seeds: Sequence[int]
    session: SamplingSession
    dialogue: Dialogue
    host: EnvironmentHost
    clock: Clock
    calls: int = 0
    asked: dict[int, SampledTurn | None] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)

    def run(self, games: Sequence[OngoingGame]) -> None:
        queue = self.host
        try:
            for number, game in enumerate(games):
                seed = derive_seed(self.seeds[game.tree], "environment", game.place)
                queue.submit(number, "reset", (self.problems[game.tree].fields, seed))
                self.asked[number] = None
            since = 0.0
            while self.asked or self.ready:
                answers = queue.collect(self._find_longest_wait(queue.patience, since))
                if answers and not self.ready:
                    since = self.clock.now()
                for number, answer in answers:
                    self._take_answer(games, number, answer)
                wait = self._find_longest_wait(queue.patience, since)
                if self.ready and wait is not None and wait <= 0:
                    for number, turn in self._sample([(n, games[n]) for n in sorted(self.ready)]):
                        self.asked[number] = turn
                        queue.submit(number, "step", (turn.game.state, self.plan.action(turn)))
                    self.ready.clear()
        finally:
            self.host.release([game.state for game in games if game.state is not None])

    def _find_longest_wait(self, patience: float | None, since: float) -> float | None:
        """Seconds that the turns which wait for the model may wait for others; None: for one."""
        if not self.asked:
            return 0.0
        if not self.ready or patience is None:
            return None
        return max(0.0, since + patience - self.clock.now())

    def _take_answer(self, games: Sequence[OngoingGame], number: int, answer: Any) -> None:
        game, turn = games[number], self.asked.pop(number)
        if isinstance(answer, HostFault):
            game.state = None
            if turn is not None:
                game.mover.add_turn(turn.segment)
            _end_with_fault(game, answer, self.plan)
            return
        if turn is None:
            game.state = answer
        elif not self._record_step(turn, answer):
            return
        if _has_room(game, self.plan, self.session.context_length):
            self.ready.append(number)
        else:
            self._leave(game)

    def _record_step(self, turn: SampledTurn, step: Step) -> bool:
        """Records a turn and its answer; returns whether the game goes on."""
        plan, game, mover = self.plan, turn.game, turn.game.mover
        mover.add_turn(replace(turn.segment, kind=step.kind, info=step.info))
        if plan.players > 1:
            game.players[1 - game.next].report(step.opponent_info)
            game.next = step.player
        game.state = None if step.done else step.state
        if step.done:
            return False
        # Also after the last turn, because it was not done.
        fault = _show_observation(plan, step, turn, self.problems[game.tree], self.dialogue)
        if fault is not None:
            _end_with_fault(game, fault, plan)
            self._leave(game)
            return False
        if plan.players == 1:
            mover.completion = turn.order
        return True

    def _leave(self, game: OngoingGame) -> None:
        if game.state is not None:
            self.host.release([game.state])
            game.state = None

    def _sample(
        self, waiting: Sequence[tuple[int, OngoingGame]]
    ) -> Iterator[tuple[int, SampledTurn]]:
        """Samples the next turn of each game, those with the same settings together."""
        by_settings: dict[bool, list[tuple[int, OngoingGame]]] = {}
        for number, game in waiting:
            is_forced = self.plan.players == 1 and game.mover.turns + 1 > self.plan.max_turns
            by_settings.setdefault(is_forced, []).append((number, game))
        for batch in by_settings.values():
            yield from self._sample_batch(batch)

    def _sample_batch(
        self, batch: Sequence[tuple[int, OngoingGame]]
    ) -> Iterator[tuple[int, SampledTurn]]:
        sampling = self.plan.sampling(batch[0][1].mover.turns + 1)
        groups = self._group_games(batch)
        requests = self._build_requests(groups)
        completions = [one for group in self.session.generate(requests, sampling) for one in group]
        self.calls += 1
        flat = [pair for group in groups for pair in group]
        for order, ((number, game), completion) in enumerate(zip(flat, completions, strict=True)):
            segment = build_turn_segment(
                completion,
                self.dialogue,
                sampling,
                parent=NO_PARENT,
                number=game.mover.turns + 1,
                kind=FAILED,  # until it is answered
                seed=game.derive_turn_seed(self.seeds[game.tree]),
                context=game.mover.context,
            )
            calls = self.plan.read_calls(self.dialogue, segment.text, game.mover.context)
            yield number, SampledTurn(game, segment, (self.calls, order), calls)

    def _group_games(
        self, batch: Sequence[tuple[int, OngoingGame]]
    ) -> list[list[tuple[int, OngoingGame]]]:
        """Groups games that share a request: those of a problem in their first turn."""
        groups: dict[tuple[bool, int], list[tuple[int, OngoingGame]]] = {}
        for number, game in batch:
            begins = _begins(game)
            groups.setdefault((begins, game.tree if begins else number), []).append((number, game))
        return list(groups.values())

    def _build_requests(
        self, groups: Sequence[Sequence[tuple[int, OngoingGame]]]
    ) -> list[CompletionRequest]:
        """One per group; in self-play no cache is kept: the next turn is another player's."""
        firsts = [group[0][1].mover for group in groups]
        extended = [mover.find_completion(self.calls) for mover in firsts]
        keeps = None not in extended
        return [
            CompletionRequest(
                mover.context,
                extends if keeps else None,
                tuple(game.derive_turn_seed(self.seeds[game.tree]) for _, game in group),
                self.plan.players > 1 or mover.turns + 1 == self.plan.last,
            )
            for group, mover, extends in zip(groups, firsts, extended, strict=True)
        ]


def _has_room(game: OngoingGame, plan: EnvironmentPlan, context_length: int) -> bool:
    rollout = game.mover
    if rollout.turns >= plan.last:
        return False
    room = context_length - plan.sampling(rollout.turns + 1).max_new_tokens
    return _begins(game) or len(rollout.context) <= room


def _begins(game: OngoingGame) -> bool:
    return game.next == 0 and game.mover.turns == 0


def _require_encodable_texts(plan: EnvironmentPlan, dialogue: Dialogue) -> None:
    """Checks the experiment's own texts before an environment is blamed."""
    if plan.forced_answer is not None:
        try:
            dialogue.encode_observation(plan.forced_answer.template, (), inline=True)
        except SpecError as error:
            raise SpecError(f"rollout.forced_answer.template: {error}") from error


def _show_observation(
    plan: EnvironmentPlan,
    step: Step,
    turn: SampledTurn,
    problem: Problem,
    dialogue: Dialogue,
) -> HostFault | None:
    """Shows an observation to the next player; text that cannot be encoded is the environment's
    fault."""
    rollout = turn.game.mover
    try:
        if rollout.opening is None:
            seen = replace(problem, prompt=step.observation, allow_control_tokens=False)
            rollout.open(plan.opening(seen, dialogue), step.anchor)
            return None
        prompt = plan.encode_answer(
            step, turn.calls, rollout.last_turn, rollout.turns + 1, dialogue
        )
    except SpecError as error:
        return HostFault(f"its observation cannot be shown: {error}")
    rollout.chain.append(prompt.to_segment("environment", anchor=step.anchor))
    rollout.context += prompt.token_ids
    return None


def _end_with_fault(game: OngoingGame, fault: HostFault, plan: EnvironmentPlan) -> None:
    for rollout in game.players:
        rollout.chain.append(build_fault_segment(fault, plan))


def build_fault_segment(fault: HostFault, plan: EnvironmentPlan) -> Segment:
    """A segment in place of an environment's answer; scoring drops the rollout."""
    by = {} if plan.by == "environment" else {"by": plan.by}
    return Segment(
        parent=NO_PARENT,
        author="environment",
        token_ids=(),
        info={"fault": fault.reason, "on_error": plan.on_error, **by},
    )


def is_fault_segment(segment: Segment) -> bool:
    return segment.author == "environment" and "fault" in segment.info
