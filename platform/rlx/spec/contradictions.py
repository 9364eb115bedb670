"""What values of an experiment contradict each other, and which are probably unintended.

Each is reported at the key that causes it, or at the one that it contradicts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from rlx.plugin import LARGEST
from rlx.spec.base import KeyPath, get_at_path
from rlx.spec.experiment import ExperimentSpec
from rlx.spec.model import TinyModelSpec, WarmStart
from rlx.spec.reading import (
    Diagnostic,
    build_error,
    build_warning,
    did_you_mean,
    format_key_path,
    suggest_name,
)
from rlx.spec.reward import EVERY_TURN, GlobalReward, TurnReward
from rlx.spec.rollout import EnvironmentRolloutSpec, MultiTurnRolloutSpec
from rlx.spec.training import CriticSpec, OptimizerSpec, VllmSamplerSpec

_MOST_ROWS = 10**6
"""Rows that one step may sample: all of them are in memory at once, and each is a row of the
registry."""
_LARGEST_RATE = 0.1
"""Larger learning rates are probably a slip: AdamW moves a weight by up to its rate per step."""
_HELD_OUT = "held_out"
"""Name of the task's own held-out set, which every experiment has."""
_RUN_REFERENCE = re.compile(r"latest|(r-)?[0-9]+")
"""How commands refer to runs, beside their names."""
_AnyReward = TurnReward | GlobalReward


def find_contradictions(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields contradictions between sections; contradictions introduced by a phase's `set` are not
    covered."""
    if _RUN_REFERENCE.fullmatch(spec.name):
        yield _refuse(
            ("name",),
            f"is {spec.name!r}, which commands read as a run's number or the newest run",
            f"choose another, such as 'run-{spec.name}'",
        )
    yield from _check_sizes(spec)
    yield from _check_spans(spec)
    yield from _check_rewards(spec)
    yield from _check_expected_score(spec)
    yield from _check_loss(spec)
    yield from _check_probe(spec)
    yield from _check_rank_counts(spec)
    yield from _check_positions(spec)
    yield from _check_sampling(spec)


def _refuse(path: KeyPath, text: str, *helps: str, against: KeyPath = ()) -> Diagnostic:
    """Returns the error whose message is the name of a setting and what is wrong with it."""
    return build_error(path, f"{format_key_path(path)} {text}", *helps, against=against)


def _warn(path: KeyPath, text: str, *helps: str, against: KeyPath = ()) -> Diagnostic:
    return build_warning(path, f"{format_key_path(path)} {text}", *helps, against=against)


# Sizes -----------------------------------------------------------------------------------------


def _check_sizes(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    if spec.steps > LARGEST:
        text = f"have {spec.steps} steps together, and a run has at most {LARGEST}"
        yield _refuse(("phases",), text)
    prompts = spec.rollout.prompts_per_step
    for section, parts in (
        ("optimizer", spec.optimizer.mini_batches),
        ("critic", spec.critic.mini_batches if spec.critic else 1),
    ):
        if parts > prompts:
            yield _refuse(
                (section, "mini_batches"),
                f"is {parts}, but rollout.prompts_per_step is {prompts}: a part would have no "
                "prompt",
                against=("rollout", "prompts_per_step"),
            )
    if spec.rollout.rows_per_step > _MOST_ROWS:
        keys = (level.count_key.removeprefix("rollout.") for level in spec.rollout.list_levels())
        counts = ", ".join(("prompts_per_step", *keys))
        yield build_error(
            ("rollout", "prompts_per_step"),
            f"rollout has {spec.rollout.rows_per_step} rows per step, and at most {_MOST_ROWS} are "
            "possible",
            f"lower one of {counts}",
            against=("rollout",),
        )


def _check_spans(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    for level in spec.rollout.list_levels():
        spans = level.turn.spans
        for number, span in enumerate(spans):
            if span in spans[:number]:
                path = ("rollout", *level.at, "spans", number)
                message = f"{level.key}.spans names {span!r} more than once"
                yield build_error(path, message, "name each tag once")
    bonus, declared = spec.loss.entropy, _list_spans(spec)
    if bonus is not None and bonus.span is not None and bonus.span not in declared:
        yield _refuse_span(("loss", "entropy", "span"), bonus.span, declared)


def _list_spans(spec: ExperimentSpec) -> list[str]:
    return [span for turn in spec.rollout.turn_specs.values() for span in turn.spans]


def _refuse_span(path: KeyPath, span: str, declared: list[str]) -> Diagnostic:
    """Returns the error for a span of a term of the loss that no turn declares."""
    text = f"is {span!r}, but the turns declare {', '.join(declared) or 'no spans'}"
    return _refuse(path, text, suggest_name(span, declared))


# Rewards ---------------------------------------------------------------------------------------


def _check_rewards(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    turn, whole = spec.rewards.turn, spec.rewards.global_
    if not spec.learns_from_rewards:
        yield from _check_teacher(spec)
    if not turn and not whole:
        if spec.learns_from_rewards:
            yield _refuse(
                ("rewards",),
                "is empty: name at least one under rewards.turn",
                "to learn from model.reference alone, add `loss: {kl: {coefficient: 1}}`"
                if spec.model.reference is not None
                else "",
            )
        return
    if not spec.learns_from_rewards:
        pass
    elif all(name.startswith("_") for name in (*turn, *whole)):
        yield build_error(
            ("rewards", "turn" if turn else "global"),
            "nothing to learn from: every reward's name begins with '_', and those are never "
            "summed",
            "remove the '_' from each reward that should count",
        )
    elif spec.loss.entropy is None and not spec.rewards.list_summed_weights():
        yield build_error(
            ("rewards", "turn" if turn else "global"),
            "nothing to learn from: every reward that is summed has a weight of 0",
            "give the rewards that should count another weight",
        )
    for name in whole:
        if name in turn:
            yield _refuse(
                ("rewards", "global", name),
                "has the name of a turn reward, so records could not tell them apart",
                "rename one of them",
                against=("rewards", "turn", name),
            )
    turns = spec.rollout.turns
    for name, reward in turn.items():
        # Only the environment plugin knows its kinds of turn.
        if isinstance(spec.rollout, EnvironmentRolloutSpec) or reward.turn == EVERY_TURN:
            continue
        if reward.turn not in turns:
            text = f"is {reward.turn!r}, but schedule {spec.rollout.schedule!r} has only "
            path = ("rewards", "turn", name, "turn")
            yield _refuse(path, text + ", ".join(turns), suggest_name(reward.turn, turns))
    all_rewards: dict[str, _AnyReward] = {**whole, **turn}
    for name, one in all_rewards.items():
        for key, other in _list_read_rewards(one).items():
            yield from _check_reward_reference(name, key, other, all_rewards, turns)
        if isinstance(one, TurnReward) and one.over != "path" and one.of is None:
            yield _refuse(
                ("rewards", "turn", name, "over"),
                f"is {one.over!r}, but the reward has no `of` to read",
                "name the reward that it reads under `of`",
            )
    yield from _check_reward_cycles(all_rewards)
    yield from _check_evaluation_judge(spec)
    if _HELD_OUT in spec.evaluation.variants:
        yield _refuse(
            ("evaluation", "variants", _HELD_OUT),
            "has the name of the task's own held-out set",
            "choose another name",
        )


def _check_teacher(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields what reads rewards in an experiment that learns from a teacher alone."""
    if spec.rollout.dynamic_sampling is not None:
        yield _refuse(
            ("rollout", "dynamic_sampling"),
            "keeps prompts whose rewards differ, and no reward is summed",
            "drop it: every prompt teaches",
            against=("model", "reference"),
        )
    if spec.probe is not None and not (spec.rewards.turn or spec.rewards.global_):
        yield _refuse(
            ("probe",),
            "needs a reward that says whether an answer is correct, and there is none",
            "record one without summing it: a name that begins with '_'",
            against=("model", "reference"),
        )


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
    within = isinstance(mine, TurnReward)
    known = [n for n, r in rewards.items() if not within or isinstance(r, TurnReward)]
    if other == name:
        yield _refuse(path, "is the reward itself", f"name another reward, or drop `{key}`")
    elif theirs is None or (within and not isinstance(theirs, TurnReward)):
        what = "a turn reward" if within else "a reward"
        text = f"is {other!r}, which is not {what}; there are: {', '.join(known)}"
        yield _refuse(path, text, suggest_name(other, (n for n in known if n != name)))
    elif isinstance(mine, TurnReward) and isinstance(theirs, TurnReward):
        if not (mine.turn in turns and theirs.turn in turns):
            return
        over = mine.over if key == "of" else "path"
        is_later = turns.index(theirs.turn) > turns.index(mine.turn)
        if over == "path" and is_later:
            text = f"is {other!r}, which scores a later turn: {theirs.turn} after {mine.turn}"
            help_ = "a reward reads rewards of its own turn and of earlier ones"
            if key == "of":
                help_ += "; `over: below` reads the mean over the turns below"
            yield _refuse(path, text, help_)
        elif over == "below" and not is_later:
            yield _refuse(
                path,
                f"is {other!r}, which scores {theirs.turn} turns, and over is 'below': none of "
                f"them is below {mine.turn} turns",
                "`over: path` reads the turn itself and earlier ones, `over: prompt` all",
                against=(*path[:-1], "over"),
            )


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
        text = f"forms a cycle: {' → '.join(names)}"
        yield _refuse(path, text, "a reward is computed after the rewards that it reads")
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
    first, turns = spec.rollout.answer_turn, spec.rollout.turns
    names = (*rewards, *spec.rewards.global_)
    path: KeyPath = ("evaluation", "correct")
    choices: Iterable[str] = rewards
    help_ = ""
    if judge not in names:
        what, choices = f"is not a reward; there are: {', '.join(names) or 'none'}", names
        if "correct" not in spec.evaluation.model_fields_set:
            only = names[0] if len(names) == 1 else "NAME"
            help_ = (
                f"say which reward means that an answer is right: evaluation: {{correct: {only}}}"
            )
            path = path if "evaluation" in spec.model_fields_set else ("rewards",)
    elif judge in rewards and isinstance(spec.rollout, MultiTurnRolloutSpec):
        what, choices = "scores turns", spec.rewards.global_
        help_ = "it must say whether a whole rollout is right: name one of rewards.global"
    elif judge not in rewards and first != turns[0]:
        what = "scores what continues the prompt"
        help_ = f"that is a {turns[0]} here: name a reward of {first} turns"
    elif judge in rewards and rewards[judge].turn in {*turns} - {first}:
        what = f"scores {rewards[judge].turn} turns"
        choices = [name for name, reward in rewards.items() if reward.turn == first]
        help_ = f"it must say whether an {first} is correct"
    else:
        return
    yield build_error(
        path,
        f"evaluation.correct is {judge!r}, which {what}",
        suggest_name(judge, choices, help_),
        against=("rewards", "turn", judge, "turn") if judge in rewards else (),
    )


# Probe, ranks and positions -----------------------------------------------------------------------


def _check_probe(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    if spec.probe is None:
        return
    first, *_ = spec.rollout.list_levels()
    spans = first.turn.spans
    if first.kind != spec.rollout.answer_turn:
        yield _refuse(
            ("probe",),
            f"continues the first turn, which is a {first.kind} here, not an answer",
            "drop `probe`, or let the first level answer",
            against=("rollout", *first.at),
        )
        return
    if isinstance(spec.rollout, MultiTurnRolloutSpec):
        yield _refuse(
            ("probe",),
            "needs the reasoning and the answer in one turn: schedule "
            f"{spec.rollout.schedule!r} has several turns",
            "drop `probe`, or choose another schedule",
            against=("rollout", "schedule"),
        )
        return
    if first.turn.prefix:
        yield build_error(
            (*("rollout", *first.at), "prefix"),
            "probe cuts turns that the policy has written from their first character, and "
            f"{first.key}.prefix gives theirs",
            "drop `prefix`, or drop `probe`",
            against=("probe",),
        )
    span: str | None = spec.probe.span
    if span not in spans:
        text = (
            f"is {span!r}, but {first.key}.spans has {', '.join(spans) or 'none'}: there would be "
            "no reasoning to cut"
        )
        yield _refuse(("probe", "span"), text, suggest_name(spec.probe.span, spans))
        span = did_you_mean(spec.probe.span, spans)  # what was probably meant
    if span is not None and f"</{span}>" not in spec.probe.force:
        yield _refuse(
            ("probe", "force"),
            f"is {spec.probe.force!r}, which does not end the reasoning with </{span}>",
            f"force: '</{span}><answer>'",
            against=("probe", "span"),
        )
    name = spec.probe.close.strip("</>")
    if spec.probe.close != f"</{name}>" or not spec.probe.force.rstrip().endswith(f"<{name}>"):
        yield _refuse(
            ("probe", "close"),
            f"is {spec.probe.close!r}, which is not the closing tag of what probe.force opens, "
            f"{spec.probe.force!r}",
            "force: '</think><answer>' goes with close: '</answer>'",
            against=("probe", "force"),
        )


def _check_rank_counts(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    ranks = spec.runner.ranks
    shared: dict[KeyPath, int] = {("evaluation", "problems"): spec.evaluation.problems}
    if spec.probe is not None:
        shared["probe", "problems"] = spec.probe.problems
    if not all(phase.set for phase in spec.phases):
        shared["rollout", "prompts_per_step"] = spec.rollout.prompts_per_step
    for path, count in shared.items():
        if ranks > count:
            text = f"is {count}, but runner.ranks is {ranks}: a rank would have nothing to sample"
            name = format_key_path(path)
            help_ = f"set {name} to {ranks} or more, or runner.ranks to {count} or fewer"
            yield _refuse(path, text, help_, against=("runner", "ranks"))


def _check_positions(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    if not isinstance(spec.model, TinyModelSpec):
        return
    budgets = spec.rollout.budgets
    total, room = sum(budgets.values()), spec.model.max_position
    first = next(iter(budgets.values()))
    if spec.probe is not None and first + spec.probe.max_new_tokens >= room > total:
        yield _refuse(
            ("probe", "max_new_tokens"),
            f"is {spec.probe.max_new_tokens}, after reasoning of up to {first} tokens: with a "
            f"prompt, they do not fit into model.max_position {room}",
            "lower it, or raise model.max_position",
            against=("model", "max_position"),
        )
    if total >= room:
        turns = ", ".join(f"{turn} {budget}" for turn, budget in budgets.items())
        longest = max(spec.rollout.list_levels(), key=lambda level: budgets[level.kind])
        yield _refuse(
            ("model", "max_position"),
            f"is {room}, but the turns may take {total} tokens ({turns}), which leaves no room for "
            "a prompt",
            f"set max_position to {total} plus the length of the longest prompt, or lower "
            "max_new_tokens",
            against=("rollout", *longest.at, "max_new_tokens"),
        )


# Loss ---------------------------------------------------------------------------------------------


def _check_expected_score(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    expected = spec.loss.expected
    if expected is None:
        return
    if isinstance(spec.rollout, MultiTurnRolloutSpec):
        yield _refuse(
            ("loss", "expected"),
            f"needs one confidence and one label per row: schedule {spec.rollout.schedule!r} has "
            "several turns in a row",
            "drop `loss.expected`, or choose another schedule",
            against=("rollout", "schedule"),
        )
        return
    turns, rewards, spans = spec.rollout.turn_specs, spec.rewards.turn, _list_spans(spec)
    if expected.span not in spans:
        yield _refuse_span(("loss", "expected", "span"), expected.span, spans)
        return
    label = rewards.get(expected.of)
    if label is None:
        text = f"is {expected.of!r}, which is not a turn reward; there are: "
        text += ", ".join(rewards) or "none"
        yield _refuse(("loss", "expected", "of"), text, suggest_name(expected.of, rewards))
        return
    order = list(turns)
    states = max(order.index(name) for name, turn in turns.items() if expected.span in turn.spans)
    if label.turn in order and order.index(label.turn) > states:
        yield _refuse(
            ("loss", "expected", "of"),
            f"is {expected.of!r}, which scores {label.turn} turns, after the {order[states]} that "
            f"states the {expected.span}",
            "what would have been answered after another value is unknown: drop `loss.expected`, "
            "and sample several confidences",
        )


def _check_loss(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    loss, adaptive, rows = spec.loss, spec.credit.kl_adaptive, spec.rollout.rows_per_step
    if adaptive is not None and 0.2 * rows >= adaptive.horizon:
        yield _refuse(
            ("credit", "kl_adaptive", "horizon"),
            f"is {adaptive.horizon:g}, but a step has up to {rows} rollouts: β would be multiplied "
            "by 1 - 0.2 · rollouts / horizon, which is not positive",
            "the horizon counts rollouts, not steps; the original method uses 10000",
        )
    if loss.kl is not None and spec.credit.use_kl_in_reward:
        yield build_error(
            ("loss", "kl"),
            "loss.kl and credit.use_kl_in_reward are both on: KL would be penalized twice",
            "keep one of them: KL as a penalty in the loss, or as part of the reward",
            against=("credit", "use_kl_in_reward"),
        )
    if loss.correction is not None and loss.old_logprobs != "learner":
        yield _refuse(
            ("loss", "correction"),
            "weighs the learner's old log-probabilities against the sampler's, but "
            f"loss.old_logprobs is {loss.old_logprobs!r}: they would be identical",
            "`old_logprobs: learner` computes them",
            against=("loss", "old_logprobs"),
        )
    if loss.surrogate in ("dppo_tv", "dppo_kl") and loss.ratio != "token":
        yield _refuse(
            ("loss", "ratio"),
            f"is {loss.ratio!r}, but loss.surrogate {loss.surrogate!r} compares the probabilities "
            "of single tokens",
            "use `ratio: token`, or another surrogate",
            against=("loss", "surrogate"),
        )
    if loss.constant_length is not None and loss.aggregate != "constant":
        yield _refuse(
            ("loss", "constant_length"),
            f"is {loss.constant_length}, but loss.aggregate {loss.aggregate!r} does not divide by "
            "a constant",
            "use `aggregate: constant`, or drop `constant_length`",
            against=("loss", "aggregate"),
        )


# Sampler ------------------------------------------------------------------------------------------


def _check_sampling(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields settings that the engine would silently change or cannot honor, and those of the
    rollout that self-play cannot have."""
    sampler = spec.sampler
    if spec.runner.device == "cpu" and sampler.needs_gpu:
        yield _refuse(
            ("sampler", "engine"),
            f"is {sampler.engine}, which needs a GPU",
            "choose another engine",
            against=("runner", "device"),
        )
    engine = "vLLM" if isinstance(sampler, VllmSamplerSpec) else sampler.engine
    for level in spec.rollout.list_levels():
        temperature = level.turn.temperature
        if temperature < sampler.min_temperature:
            yield _refuse(
                ("rollout", *level.at, "temperature"),
                f"is {temperature:g}, but {engine} allows none below {sampler.min_temperature:g}",
                "for greedy decoding, use top_k: 1",
                against=("sampler", "engine"),
            )
    rollout = spec.rollout
    if not isinstance(rollout, EnvironmentRolloutSpec) or rollout.self_play is None:
        return
    for key, why in (
        ("forced_answer", "a turn after the last one would be one player's alone"),
        ("dynamic_sampling", "it would drop the rollouts of one player of a game"),
    ):
        if getattr(rollout, key) is not None:
            yield _refuse(
                ("rollout", key),
                f"does not go with rollout.self_play: {why}",
                "drop one of them",
                against=("rollout", "self_play"),
            )


# What is valid, and probably unintended -----------------------------------------------------------


def find_cautions(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields warnings about the experiment as it stands in phases without `set`."""
    plain = [phase for phase in spec.phases if not phase.set]
    used: list[tuple[KeyPath, OptimizerSpec | CriticSpec | WarmStart, str, int]] = []
    if plain:
        shortest = min(plain, key=lambda phase: phase.steps)
        used += [(("optimizer",), spec.optimizer, f"phase '{shortest.name}'", shortest.steps)]
    if spec.critic is not None:
        used += [(("critic",), spec.critic, "the run", spec.steps)]
    if (warm := spec.model.warm_start) is not None:
        used += [(("model", "warm_start"), warm, "the warm start", warm.steps)]
    for path, adam, whole, steps in used:
        if adam.warmup_steps >= steps:
            yield _warn(
                (*path, "warmup_steps"),
                f"is {adam.warmup_steps}, but {whole} ends after {steps} steps: the learning rate "
                "never leaves its warm-up",
                against=(*path, "steps"),
            )
        if adam.learning_rate > _LARGEST_RATE:
            yield _warn(
                (*path, "learning_rate"),
                f"is {adam.learning_rate:g}: AdamW would move every weight by about that much in "
                "each step",
                "1e-6 is usual for a pretrained model and 1e-3 for a tiny one",
            )
    yield from _check_replaced_sections(spec)
    if plain:
        yield from _check_turn_sampling(spec)
        yield from _check_kl_settings(spec)
        low, high = spec.loss.clip
        if spec.loss.surrogate in ("clip", "cispo") and 0.5 <= low < 1 < high < 2:
            yield _warn(
                ("loss", "clip"),
                f"is [{low:g}, {high:g}], distances from 1: the ratio is clipped to "
                f"[{1 - low:g}, {1 + high:g}]",
                f"for the bounds {low:g} and {high:g} write [{1 - low:g}, {high - 1:g}]",
            )


def _check_replaced_sections(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields mappings in a phase's `set` that put values of the experiment back to defaults."""
    before = spec.dump_resolved()
    for number, phase in enumerate(spec.phases):
        if not any(isinstance(value, dict) for value in phase.set.values()):
            continue
        try:
            after = spec.resolve_phase_spec(phase).dump_resolved()
        except ValueError:  # an error says so
            continue
        for key, written in phase.set.items():
            old, new = (get_at_path(tree, tuple(key.split("."))) for tree in (before, after))
            if not all(isinstance(one, dict) and one for one in (written, old, new)):
                continue
            apart = {
                other.split(".")[key.count(".") + 1]
                for other in phase.set
                if other.startswith(f"{key}.")
            }
            kept = old.keys() & new.keys() - written.keys() - apart
            if lost := [name for name in kept if old[name] != new[name]]:
                yield build_warning(
                    ("phases", number, "set", key),
                    f"{key!r} replaces the whole section, so {', '.join(sorted(lost))} of it "
                    f"{'has its default' if len(lost) == 1 else 'have their defaults'} "
                    f"(phase '{phase.name}')",
                    f"to keep the others, set single values: {key}.{next(iter(written), 'KEY')}",
                )


def _check_kl_settings(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    credit, penalty = spec.credit, spec.loss.kl
    if not credit.use_kl_in_reward:
        for key in ("kl_penalty", "kl_coef", "kl_adaptive"):
            if getattr(credit, key) != type(credit).model_fields[key].default:
                yield _warn(
                    ("credit", key),
                    "has no effect: KL is not part of the reward",
                    "set `credit.use_kl_in_reward: true` to include it",
                )
    if spec.model.reference is not None and penalty is None and not credit.use_kl_in_reward:
        yield _warn(
            ("model", "reference"),
            "has no effect: nothing measures the KL divergence from it",
            "add `loss: {kl: {coefficient: 1}}`, or `credit.use_kl_in_reward: true`",
        )
    if penalty is not None and penalty.kl_penalty in ("k1", "kl"):
        yield _warn(
            ("loss", "kl", "kl_penalty"),
            f"is {penalty.kl_penalty!r}: as a loss, its gradient is 0 in expectation",
            "k2 has the gradient of the KL; k1 belongs in the reward",
        )


def _check_turn_sampling(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    for number, level in enumerate(spec.rollout.list_levels()):
        at = ("rollout", *level.at)
        for key, full in (("top_p", 1.0), ("top_k", 0)):
            if (value := getattr(level.turn, key)) != full:
                yield _warn(
                    (*at, key),
                    f"is {value}: the learner's log-probabilities are of the full distribution, so "
                    "ratios and KL are not exact",
                    f"{key}: {full} samples from the full distribution",
                )
        if number == 0 and "{prompt}" not in level.turn.template:
            yield _warn((*at, "template"), "has no {prompt}: the model never sees the problem")
