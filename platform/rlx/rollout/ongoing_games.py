"""Games of a policy and an environment: the rollout of each player, and the trees that they make.

Most environments have one player, the policy. In self-play the policy plays both, and each player's
turns are a rollout of its own, with only what the environment showed to that player: the rollouts
of the first player are one tree, and those of the second another.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.plugin import Problem
from rlx.rollout.dialogue import Completion, TurnPrompt
from rlx.rollout.tree import NO_PARENT, RolloutTree, Segment, Span
from rlx.seeding import derive_seed


def derive_turn_seed(seed: int, place: int, number: int, player: int = 0) -> int:
    """Seed of a turn.

    Args:
        seed: seed of the problem.
        place: number of the game among the problem's.
        number: number of the turn in the rollout of its player.
        player: 1 for the second player.
    """
    return derive_seed(seed, "turn", place, number, *([player] if player else []))


@dataclass(slots=True)
class PlayerRollout:
    """The unfinished rollout of one player: a chain of segments, each the parent of the next.

    Attributes:
        opening: what the player reads before its first turn; None until that is known.
        anchor: name of the state in which its first turn begins; None if it has none.
        context: all tokens so far.
        completion: index of its last completion in the session's last call; None if that has none.
        turns: its turns so far.
        last_turn: tokens of the last of them.
        chain: segments after the opening.
    """

    opening: TurnPrompt | None = None
    anchor: str | None = None
    context: tuple[int, ...] = ()
    completion: int | None = None
    turns: int = 0
    last_turn: tuple[int, ...] = ()
    chain: list[Segment] = field(default_factory=list)

    def open(self, opening: TurnPrompt, anchor: str | None = None) -> None:
        """Sets what the player reads first."""
        self.opening, self.anchor, self.context = opening, anchor, opening.token_ids

    def add_turn(self, segment: Segment) -> None:
        """Adds a turn that the environment has answered."""
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
        tree: index of its problem.
        place: index among the problem's games.
        players: the rollout of each player.
        state: state of the environment.
        next: the player whose turn is next.
    """

    tree: int
    place: int
    players: tuple[PlayerRollout, ...]
    state: Any = None
    next: int = 0

    @property
    def mover(self) -> PlayerRollout:
        """The rollout that the next turn belongs to."""
        return self.players[self.next]

    def derive_turn_seed(self, seed: int) -> int:
        """Seed of the next turn, from that of the problem."""
        return derive_turn_seed(seed, self.place, self.mover.turns + 1, self.next)


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn that was sampled and has no answer yet.

    Attributes:
        game: its game; the turn belongs to the game's next player.
        number: number in its rollout, from 1.
        seed: sampling seed.
        order: index of its completion in the session's call.
    """

    game: OngoingGame
    number: int
    seed: int
    order: int
    completion: Completion
    text: str
    spans: Mapping[str, Span]
    hull: tuple[int, int] | None

    def segment(self, kind: str, info: Mapping[str, Any]) -> Segment:
        """Builds the turn's segment, with the kind and info that the environment reported."""
        return Segment(
            parent=NO_PARENT,
            author="policy",
            token_ids=self.completion.token_ids,
            turn=self.number,
            kind=kind,
            logprobs=self.completion.logprobs,
            finish_reason=self.completion.finish_reason,
            text=self.text,
            spans=self.spans,
            hull=self.hull,
            seed=self.seed,
            info=info,
        )


def build_player_trees(problem: Problem, games: Sequence[OngoingGame]) -> Iterator[RolloutTree]:
    """Yields the tree of each player, from all games of one problem.

    In self-play, the problem's `fields` name the `player`, and the second player's problem has its
    own id and prompt.
    """
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
    """The root has what all openings begin with; the rest of an opening is an observation.

    The openings of a first player are equal, those of a second contain the first one's turn.
    """
    openings = [rollout.opening for rollout in rollouts if rollout.opening is not None]
    shared = _count_shared([opening.text for opening in openings])
    text = openings[0].text[:shared] if openings else ""
    shared = _count_shared([opening.token_ids for opening in openings])
    ids = openings[0].token_ids[:shared] if openings else ()
    segments = [Segment(parent=NO_PARENT, author="prompt", token_ids=ids, text=text)]
    for rollout in rollouts:
        parent = 0
        for segment in (*_build_opening_rest(rollout, text, ids), *rollout.chain):
            segments.append(replace(segment, parent=parent))
            parent = len(segments) - 1
    return RolloutTree(problem, tuple(segments))


def _count_shared(sequences: Sequence[Sequence[Any]]) -> int:
    """Length of the longest common prefix."""
    count = 0
    for column in zip(*sequences, strict=False):
        if any(element != column[0] for element in column):
            break
        count += 1
    return count


def _build_opening_rest(
    rollout: PlayerRollout, text: str, ids: tuple[int, ...]
) -> Iterator[Segment]:
    opening = rollout.opening
    if opening is None or (opening.token_ids == ids and rollout.anchor is None):
        return
    yield Segment(
        parent=NO_PARENT,
        author="environment",
        token_ids=opening.token_ids[len(ids) :],
        text=opening.text[len(text) :],
        info={} if rollout.anchor is None else {"state": rollout.anchor},
    )
