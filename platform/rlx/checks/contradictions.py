"""Checks that the values of an experiment are consistent with each other, without plugins."""

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from rlx.checks.loss_contradictions import find_loss_contradictions
from rlx.checks.sampler_settings import check_engine_settings
from rlx.checks.self_play import check_self_play
from rlx.spec import (
    EVERY_TURN,
    LARGEST,
    EnvironmentRolloutSpec,
    ExperimentSpec,
    GlobalReward,
    KeyPath,
    TinyModelSpec,
    TurnReward,
)
from rlx.spec.reading import Diagnostic, build_error, did_you_mean, suggest_name

__all__ = ["find_contradictions"]

MOST_ROWS = 10**6
"""Rows that one step may sample: all of them are in memory at once, and each is a row of the
registry."""
HELD_OUT = "held_out"
"""Name of the task's own held-out set, which every experiment has."""

_AnyReward = TurnReward | GlobalReward


def find_contradictions(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields contradictions between sections; contradictions introduced by a phase's `set` are not
    covered."""
    yield from _check_sizes(spec)
    yield from _check_repeated_spans(spec)
    yield from _check_reward_settings(spec)
    yield from find_loss_contradictions(spec)
    yield from _check_probe_settings(spec)
    yield from _check_kl_horizon(spec)
    yield from _check_rank_counts(spec)
    yield from _check_position_budget(spec)
    yield from check_engine_settings(spec)
    yield from check_self_play(spec)


# Sizes -----------------------------------------------------------------------------------------


def _check_sizes(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    if spec.steps > LARGEST:
        yield build_error(
            ("phases",), f"phases have {spec.steps} steps together, and a run has at most {LARGEST}"
        )
    prompts = spec.rollout.prompts_per_step
    for section, parts in (
        ("optimizer", spec.optimizer.mini_batches),
        ("critic", spec.critic.mini_batches if spec.critic else 1),
    ):
        if parts > prompts:
            yield build_error(
                (section, "mini_batches"),
                f"{section}.mini_batches is {parts}, but rollout.prompts_per_step is {prompts}: "
                "a part would have no prompt",
                against=("rollout", "prompts_per_step"),
            )
    if spec.rollout.rows_per_step > MOST_ROWS:
        keys = (level.count_key.removeprefix("rollout.") for level in spec.rollout.list_levels())
        counts = ", ".join(("prompts_per_step", *keys))
        yield build_error(
            ("rollout", "prompts_per_step"),
            f"rollout has {spec.rollout.rows_per_step} rows per step, and at most {MOST_ROWS} are "
            "possible",
            f"lower one of {counts}",
            against=("rollout",),
        )


def _check_repeated_spans(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    for level in spec.rollout.list_levels():
        spans = level.turn.spans
        for number, span in enumerate(spans):
            if span in spans[:number]:
                path = ("rollout", *level.at, "spans", number)
                message = f"{level.key}.spans names {span!r} more than once"
                yield build_error(path, message, "name each tag once")


# Rewards ---------------------------------------------------------------------------------------


def _check_reward_settings(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    turn, whole = spec.rewards.turn, spec.rewards.global_
    if not turn and not whole:
        yield build_error(("rewards",), "rewards is empty: name at least one under rewards.turn")
        return
    if all(name.startswith("_") for name in (*turn, *whole)):
        yield build_error(
            ("rewards", "turn" if turn else "global"),
            "nothing to learn from: every reward's name begins with '_', and those are never "
            "summed",
            "remove the '_' from each reward that should count",
        )
    elif spec.loss.entropy is None and not any(_list_summed_weights(spec)):
        yield build_error(
            ("rewards", "turn" if turn else "global"),
            "nothing to learn from: every reward that is summed has a weight of 0",
            "give the rewards that should count another weight",
        )
    for name in whole:
        if name in turn:
            yield build_error(
                ("rewards", "global", name),
                f"rewards.global.{name} has the name of a turn reward, so records could not tell "
                "them apart",
                "rename one of them",
                against=("rewards", "turn", name),
            )
    turns = spec.rollout.turns
    for name, reward in turn.items():
        # Only the environment plugin knows its kinds of turn.
        if isinstance(spec.rollout, EnvironmentRolloutSpec) or reward.turn == EVERY_TURN:
            continue
        if reward.turn not in turns:
            message = (
                f"rewards.turn.{name}.turn is {reward.turn!r}, but schedule "
                f"{spec.rollout.schedule!r} has only {', '.join(turns)}"
            )
            yield build_error(
                ("rewards", "turn", name, "turn"), message, suggest_name(reward.turn, turns)
            )
    all_rewards: dict[str, _AnyReward] = {**whole, **turn}
    for name, one in all_rewards.items():
        for key, other in _list_read_rewards(one).items():
            yield from _check_reward_reference(name, key, other, all_rewards, turns)
        if isinstance(one, TurnReward) and one.over != "path" and one.of is None:
            yield build_error(
                ("rewards", "turn", name, "over"),
                f"rewards.turn.{name}.over is {one.over!r}, but the reward has no `of` to read",
                "name the reward that it reads under `of`",
            )
    yield from _check_reward_cycles(all_rewards)
    yield from _check_evaluation_judge(spec)
    if HELD_OUT in spec.evaluation.variants:
        yield build_error(
            ("evaluation", "variants", HELD_OUT),
            f"evaluation.variants.{HELD_OUT} has the name of the task's own held-out set",
            "choose another name",
        )


def _list_summed_weights(spec: ExperimentSpec) -> list[float]:
    rewards = {**spec.rewards.turn, **spec.rewards.global_}
    return [one.weight for name, one in rewards.items() if not name.startswith("_")]


def _list_read_rewards(reward: _AnyReward) -> dict[str, str]:
    """The rewards that this one depends on, by the key (`of` or `requires`) that names them."""
    named = {"of": reward.of, "requires": reward.requires}
    return {key: name for key, name in named.items() if name is not None}


def _get_reward_path(name: str, reward: _AnyReward) -> tuple[str, str, str]:
    return ("rewards", "turn" if isinstance(reward, TurnReward) else "global", name)


def _check_reward_reference(
    name: str, key: str, other: str, rewards: Mapping[str, _AnyReward], turns: tuple[str, ...]
) -> Iterator[Diagnostic]:
    """Checks one `of` or `requires`; cycles are checked separately."""
    mine, theirs = rewards[name], rewards.get(other)
    path = (*_get_reward_path(name, mine), key)
    label = ".".join(path)
    within = isinstance(mine, TurnReward)
    known = [n for n, r in rewards.items() if not within or isinstance(r, TurnReward)]
    if other == name:
        yield build_error(
            path, f"{label} is the reward itself", f"name another reward, or drop `{key}`"
        )
    elif theirs is None or (within and not isinstance(theirs, TurnReward)):
        what = "a turn reward" if within else "a reward"
        message = f"{label} is {other!r}, which is not {what}; there are: {', '.join(known)}"
        yield build_error(path, message, suggest_name(other, (n for n in known if n != name)))
    elif isinstance(mine, TurnReward) and isinstance(theirs, TurnReward):
        if not (mine.turn in turns and theirs.turn in turns):
            return
        over = mine.over if key == "of" else "path"
        is_later = turns.index(theirs.turn) > turns.index(mine.turn)
        if over == "path" and is_later:
            message = (
                f"{label} is {other!r}, which scores a later turn: {theirs.turn} after {mine.turn}"
            )
            help_ = "a reward reads rewards of its own turn and of earlier ones"
            if key == "of":
                help_ += "; `over: below` reads the mean over the turns below"
            yield build_error(path, message, help_)
        elif over == "below" and not is_later:
            message = (
                f"{label} is {other!r}, which scores {theirs.turn} turns, and over is 'below': "
                f"none of them is below {mine.turn} turns"
            )
            help_ = "`over: path` reads the turn itself and earlier ones, `over: prompt` all"
            yield build_error(path, message, help_, against=(*path[:-1], "over"))


def _check_reward_cycles(rewards: Mapping[str, _AnyReward]) -> Iterator[Diagnostic]:
    """Yields one problem per cycle of `of` and `requires`, located at its first reward."""
    reads = {
        name: {
            o: key for key, o in _list_read_rewards(reward).items() if o in rewards and o != name
        }
        for name, reward in rewards.items()
    }
    while circle := _find_cycle(reads):
        first = min(circle, key=list(reads).index)
        at = circle.index(first)
        names = [*circle[at:], *circle[:at], first]
        key = reads[first][names[1]]
        path = (*_get_reward_path(first, rewards[first]), key)
        message = f"{'.'.join(path)} forms a cycle: {' → '.join(names)}"
        yield build_error(path, message, "a reward is computed after the rewards that it reads")
        reads = {name: others for name, others in reads.items() if name not in circle}


def _find_cycle(reads: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns the names of a cycle in which each reward reads the next, or an empty list."""
    try:
        TopologicalSorter(reads).prepare()
    except CycleError as error:
        return list(reversed(error.args[1][1:]))
    return []


def _check_evaluation_judge(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    rewards, judge = spec.rewards.turn, spec.evaluation.correct
    first = spec.rollout.answer_turn
    path: KeyPath = ("evaluation", "correct")
    names = (*rewards, *spec.rewards.global_)
    if judge not in names:
        message = (
            f"evaluation.correct is {judge!r}, which is not a reward; "
            f"there are: {', '.join(names) or 'none'}"
        )
        help_ = ""
        if "correct" not in spec.evaluation.model_fields_set:
            help_ = "say which reward means that an answer is right: evaluation: {correct: NAME}"
            path = path if "evaluation" in spec.model_fields_set else ("rewards",)
        yield build_error(path, message, suggest_name(judge, names, help_))
    elif judge in rewards and isinstance(spec.rollout, EnvironmentRolloutSpec):
        message = f"evaluation.correct is {judge!r}, which scores turns"
        help_ = "it must say whether a whole rollout is right: name one of rewards.global"
        yield build_error(path, message, suggest_name(judge, spec.rewards.global_, help_))
    elif judge not in rewards and first != spec.rollout.turns[0]:
        message = f"evaluation.correct is {judge!r}, which scores what continues the prompt"
        help_ = f"that is a {spec.rollout.turns[0]} here: name a reward of {first} turns"
        yield build_error(path, message, suggest_name(judge, rewards, help_))
    elif judge in rewards and rewards[judge].turn in {*spec.rollout.turns} - {first}:
        message = f"evaluation.correct is {judge!r}, which scores {rewards[judge].turn} turns"
        good = tuple(name for name, reward in rewards.items() if reward.turn == first)
        help_ = f"it must say whether an {first} is correct"
        yield build_error(
            path,
            message,
            suggest_name(judge, good, help_),
            against=("rewards", "turn", judge, "turn"),
        )


# The rest --------------------------------------------------------------------------------------


def _check_probe_settings(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    if spec.probe is None:
        return
    first, *_ = spec.rollout.list_levels()
    spans = first.turn.spans
    if first.kind != spec.rollout.answer_turn:
        yield build_error(
            ("probe",),
            f"probe continues the first turn, which is a {first.kind} here, not an answer",
            "drop `probe`, or let the first level answer",
            against=("rollout", *first.at),
        )
        return
    if isinstance(spec.rollout, EnvironmentRolloutSpec):
        yield build_error(
            ("probe",),
            "probe needs the reasoning and the answer in one turn: schedule "
            f"{spec.rollout.schedule!r} has several turns",
            "drop `probe`, or choose another schedule",
            against=("rollout", "schedule"),
        )
        return
    span: str | None = spec.probe.span
    if span not in spans:
        message = (
            f"probe.span is {span!r}, but {first.key}.spans has "
            f"{', '.join(spans) or 'none'}: there would be no reasoning to cut"
        )
        yield build_error(("probe", "span"), message, suggest_name(spec.probe.span, spans))
        span = did_you_mean(spec.probe.span, spans)  # what was probably meant
    if span is not None and f"</{span}>" not in spec.probe.force:
        yield build_error(
            ("probe", "force"),
            f"probe.force is {spec.probe.force!r}, which does not end the reasoning with </{span}>",
            f"force: '</{span}><answer>'",
            against=("probe", "span"),
        )
    name = spec.probe.close.strip("</>")
    if spec.probe.close != f"</{name}>" or not spec.probe.force.rstrip().endswith(f"<{name}>"):
        yield build_error(
            ("probe", "close"),
            f"probe.close is {spec.probe.close!r}, which is not the closing tag of what probe.force"
            f" opens, {spec.probe.force!r}",
            "force: '</think><answer>' goes with close: '</answer>'",
            against=("probe", "force"),
        )


def _check_kl_horizon(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    adaptive = spec.credit.kl_adaptive
    rows = spec.rollout.rows_per_step
    if adaptive is not None and 0.2 * rows >= adaptive.horizon:
        yield build_error(
            ("credit", "kl_adaptive", "horizon"),
            f"credit.kl_adaptive.horizon is {adaptive.horizon:g}, but a step has up to {rows} "
            "rollouts: β would be multiplied by 1 - 0.2 · rollouts / horizon, which is not "
            "positive",
            "the horizon counts rollouts, not steps; the original method uses 10000",
        )


def _check_rank_counts(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    ranks = spec.runner.ranks
    shared = {("evaluation", "problems"): spec.evaluation.problems}
    if spec.probe is not None:
        shared["probe", "problems"] = spec.probe.problems
    if not all(phase.set for phase in spec.phases):
        shared["rollout", "prompts_per_step"] = spec.rollout.prompts_per_step
    for path, count in shared.items():
        if ranks > count:
            name = ".".join(path)
            message = (
                f"{name} is {count}, but runner.ranks is {ranks}: a rank would have nothing to "
                "sample"
            )
            help_ = f"set {name} to {ranks} or more, or runner.ranks to {count} or fewer"
            yield build_error(path, message, help_, against=("runner", "ranks"))


def _check_position_budget(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    if not isinstance(spec.model, TinyModelSpec):
        return
    budgets = spec.rollout.budgets
    total, room = sum(budgets.values()), spec.model.max_position
    first = next(iter(budgets.values()))
    if spec.probe is not None and first + spec.probe.max_new_tokens >= room > total:
        yield build_error(
            ("probe", "max_new_tokens"),
            f"probe.max_new_tokens is {spec.probe.max_new_tokens}, after reasoning of up to "
            f"{first} tokens: with a prompt, they do not fit into model.max_position "
            f"{room}",
            "lower it, or raise model.max_position",
            against=("model", "max_position"),
        )
    if total >= room:
        turns = ", ".join(f"{turn} {budget}" for turn, budget in budgets.items())
        longest = max(spec.rollout.list_levels(), key=lambda level: budgets[level.kind])
        yield build_error(
            ("model", "max_position"),
            f"model.max_position is {room}, but the turns may take {total} tokens ({turns}), which "
            "leaves no room for a prompt",
            f"set max_position to {total} plus the length of the longest prompt, or lower "
            "max_new_tokens",
            against=("rollout", *longest.at, "max_new_tokens"),
        )
