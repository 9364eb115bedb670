"""Self-play: both players are the policy, each with a rollout and a view of its own."""

from typing import ClassVar

import pytest
from rows import each_row
from speech import Characters, Hashing

from rlx.batch import build_token_batch
from rlx.plugin import Environment, Problem, Step
from rlx.rollout import (
    HostFault,
    LocalHost,
    build_rollout_plan,
    check_environment_step,
    sample_rollout_trees,
)
from rlx.spec import EnvironmentRolloutSpec

TEXTS = ("draw", "stay", "again")
SECRETS = ("ace", "king")


class Cards(Environment):
    """Each player knows its own card. `again` keeps the turn; after six turns a seed decides."""

    kinds: ClassVar[tuple[str, ...]] = ("turn",)
    self_play: ClassVar[bool] = True

    def reset(self, problem, seed):
        return (seed, ())

    def step(self, state, action):
        seed, made = state
        made = (*made, (action.player, action.text))
        done = len(made) == 6
        following = action.player if action.text == "again" else 1 - action.player
        wins = seed % 2 == action.player
        return Step(
            kind="turn",
            state=(seed, made),
            observation=f"[{SECRETS[following]} after {len(made)}]",
            done=done,
            info={"won": done and wins},
            player=following,
            opponent_info={"won": done and not wins},
        )


class Failing(LocalHost):
    """Fails on the third turn of a game."""

    def step(self, calls):
        return [
            HostFault("broken") if len(call[0][1]) == 2 else step
            for call, step in zip(calls, super().step(calls), strict=True)
        ]


def grown(names, seeds, session=None, host=None, **options):
    said = {
        "environment": {"plugin": "cards"},
        "num_generations": 3,
        "max_turns": 5,
        "turn": {"template": "Q: {prompt}\n", "max_new_tokens": 20},
        "observation": "inline",
        "self_play": {"learn": "both"},
    }
    plan = build_rollout_plan(EnvironmentRolloutSpec.model_validate({**said, **options}))
    problems = [Problem(id=n, prompt=f"{n} ace", fields={"name": n}) for n in names]
    session, host = session or Hashing(TEXTS), host or LocalHost(Cards())
    return sample_rollout_trees(plan, problems, seeds, session, Characters(), host)


def test_each_player_has_a_tree_of_its_own():
    trees = grown("ab", [1, 2])
    assert [t.problem.fields for t in trees] == [
        {"name": name, "player": player} for name in "ab" for player in (0, 1)
    ]
    assert [t.problem.id for t in trees] == ["a", "a/player 1", "b", "b/player 1"]
    for tree in trees:
        assert len(tree.rollouts) == 3
        for last in tree.rollouts:
            turns = [tree.segments[i] for i in tree.turns(last)]
            assert [turn.turn for turn in turns] == list(range(1, len(turns) + 1))


def test_a_player_reads_nothing_that_the_other_alone_was_shown():
    session = Hashing(TEXTS)
    trees = grown("abcd", range(4), session)
    for number, tree in enumerate(trees):
        own, other = SECRETS if number % 2 == 0 else SECRETS[::-1]
        for last in tree.rollouts:
            text = "".join(map(chr, tree.token_ids(last)))
            assert own in text and other not in text
    asked = {r.context for requests, _ in session.calls for r in requests}
    assert not [c for c in asked if all(card in "".join(map(chr, c)) for card in SECRETS)]


def test_the_result_of_a_game_is_in_the_last_turn_of_both_and_one_wins():
    for first, second in zip(*[iter(grown("abc", [1, 2, 3]))] * 2, strict=True):
        for one, other in zip(first.rollouts, second.rollouts, strict=True):
            assert first.segments[one].info["won"] != second.segments[other].info["won"]
        for tree in (first, second):
            earlier = set(tree.policy_segments) - set(tree.rollouts)
            assert not any(tree.segments[i].info["won"] for i in earlier)


def test_groups_compare_a_player_with_itself_in_sibling_games():
    trees = grown("ab", [1, 2])
    batch = build_token_batch(trees)
    groups = dict.fromkeys(batch.group_ids.tolist())
    assert len(groups) == 4
    for group in groups:
        rows = [r for r, g in zip(batch.rows, batch.group_ids.tolist(), strict=True) if g == group]
        assert len(rows) == 3 and len({row.tree for row in rows}) == 1
    # The first observation of a second player is its prompt, not a part of its response.
    for b, row in enumerate(batch.rows):
        own = batch.is_own[b].nonzero()[:, 0]
        assert not batch.is_environment[b, : own[0]].any()
        assert batch.turn_ids[b, own[0]] == 1, row


def test_a_failure_ends_the_rollouts_of_both_players():
    for tree in grown("ab", [1, 2], host=Failing(Cards())):
        faults = [s for s in tree.segments if "fault" in s.info]
        assert len(faults) == 3 and {s.info["fault"] for s in faults} == {"broken"}


def test_a_game_ends_where_the_second_player_s_prompt_does_not_fit():
    room = len("\x01Q: a ace\n") + 20
    first, second = grown("a", [1], Hashing(TEXTS, room))
    assert len(first.policy_segments) == 3
    assert not second.policy_segments


def test_held_out_games_have_one_player():
    spec = EnvironmentRolloutSpec.model_validate(
        {"environment": {"plugin": "cards"}, "num_generations": 4, "self_play": {}}
    )
    plan = build_rollout_plan(spec)
    assert (plan.trees_per_prompt, plan.rows_per_prompt, spec.rows_per_step) == (2, 8, 256)
    held_out = plan.copy_with_sampling(1)
    assert (held_out.trees_per_prompt, held_out.rows_per_prompt) == (1, 1)
    assert plan.copy_with_siblings(2).trees_per_prompt == 2


@each_row(
    ("step", "says"),
    [
        (Step(kind="turn", player=2), "gave 2 as the next player, which is 0 or 1"),
        (Step(kind="turn", opponent_info={"x": {1}}), "gave opponent_info that is not plain JSON"),
        (Step(kind="turn", opponent_info=[1]), "gave list as opponent_info"),
    ],
)
def test_steps_that_name_no_player_are_faults(step, says):
    with pytest.raises(ValueError, match=says):
        check_environment_step(step, Cards.kinds)
