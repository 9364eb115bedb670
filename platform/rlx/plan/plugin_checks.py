"""Checks that plugins fit the spec and each other, and that no setting is silently ignored."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from rlx.discovery import (
    DEMONSTRATIONS,
    NEEDS,
    PROVIDERS,
    BuiltPlugins,
    build_plugin_diagnostic,
    find_installed_plugin,
    list_needed_streams,
    list_providers,
    resolve_plugins,
)
from rlx.errors import SpecError
from rlx.plugin import (
    Corrupts,
    Environment,
    Estimator,
    Mask,
    Plugin,
    Reward,
    StatefulEnvironment,
    get_confidence_values,
)
from rlx.plugin_calls import show_plugin_output
from rlx.plugin_files import load_function
from rlx.rollout import list_schemas
from rlx.spec import (
    EVERY_TURN,
    PROFILES,
    AgentRolloutSpec,
    EnvironmentRolloutSpec,
    ExperimentSpec,
    Gae,
    Gdpo,
    Gigpo,
    Gpg,
    Grpo,
    KeyPath,
    LossSpec,
    MaxRl,
    MtGrpo,
    MultiturnGrpo,
    MultiTurnRolloutSpec,
    Opo,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Remax,
    ToolUse,
    TreeGrpo,
    TurnLevelGae,
    TurnSpans,
    TwoLevel,
    Uniform,
    find_cautions,
)
from rlx.spec.reading import Diagnostic, build_error, build_warning, format_key_path, suggest_name


def check_parent_rewards(plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Reports a missing `of`, or one that the reward does not read."""
    built = plugins.built
    rewards = [place for place in plugins.places if place.path[0] == "rewards"]
    for place in rewards:
        if place.path not in built:
            continue
        label = format_key_path(place.path)
        reads = getattr(built[place.path], "reads_parent", False)
        if reads and place.of is None:
            yield build_error(
                place.path,
                f"{label} needs `of`: {place.name!r} reads the value of another reward",
                f"of: {next((str(u.path[-1]) for u in rewards if u is not place), 'NAME')}",
            )
        if not reads and place.of is not None:
            message = f"{label}.of is {place.of!r}, but {place.name!r} reads no other reward"
            yield build_error(
                (*place.path, "of"),
                message,
                "drop `of`; your own plugin can read it if declared as "
                "`@reward(reads_parent=True)`",
            )


def check_needed_streams(spec: ExperimentSpec, plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Reports streams that a plugin or warm start needs and the experiment does not provide."""
    wanted = [
        (place.name_path, place, name)
        for place, plugin in plugins.list_all()
        for name in list_needed_streams(plugin)
    ]
    for path, place, name in wanted:
        if name not in NEEDS:
            help_ = suggest_name(name, NEEDS, f"there are: {', '.join(NEEDS)}")
            what = f"needs '{name}', which is not an rlx stream"
            yield replace(
                build_plugin_diagnostic(
                    find_installed_plugin(place.kind, place.name), what, (help_,)
                ),
                path=path,
            )
    needs = [(path, place.label, name) for path, place, name in wanted if name in NEEDS]
    if spec.model.warm_start is not None:
        rollout = spec.rollout
        several = isinstance(rollout, EnvironmentRolloutSpec) and not rollout.has_one_turn
        wanted_of_task = "lessons" if several else "demonstrations"
        needs.append((("model", "warm_start"), "model.warm_start", wanted_of_task))
    task = plugins.built.get(("task",))
    worked = plugins.built.get(DEMONSTRATIONS, task)
    for path, who, name in needs:
        provider, source = NEEDS[name], worked if path == ("model", "warm_start") else task
        if source is not None and not provider.is_present(spec, source):
            message = (
                f"{who} needs {name}, which {provider.origin} provides: this experiment has none"
            )
            yield build_error(path, message, provider.help)


def check_plugin_fit(spec: ExperimentSpec, plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Yields conflicts between the spec and those of its plugins that could be built."""
    built = plugins.built
    if estimator := built.get(("estimator",)):
        yield from _check_estimator_fit(spec, cast(Estimator, estimator))
        yield from _check_confidence_labels(spec, cast(Estimator, estimator))
        yield from _check_groups_of_one(spec, cast(Estimator, estimator))
        yield from _check_greedy_groups(spec, cast(Estimator, estimator))
        yield from _check_level_factors(spec, cast(Estimator, estimator))
    if task := built.get(("task",)):
        yield from _check_task_corruption(spec, task)
        yield from _check_confidence_values(spec, task)
    if mask := built.get(("mask",)):
        yield from _check_mask_reach(spec, cast(Mask, mask))
        yield from _check_turns_without_spans(spec, cast(Mask, mask))
    yield from _check_reward_spans(spec, plugins)
    if environment := built.get(("rollout", "environment")):
        yield from _check_reward_turns(spec, cast(Environment, environment))
        yield from _check_self_play(spec, cast(Environment, environment))
        yield from _check_live_sessions(spec, cast(Environment, environment))
    if isinstance(spec.rollout, AgentRolloutSpec):
        yield from _check_agent(spec.rollout)
    if isinstance(spec.rollout, EnvironmentRolloutSpec):
        yield from _check_tools(spec.rollout)


def _check_estimator_fit(spec: ExperimentSpec, estimator: Estimator) -> Iterator[Diagnostic]:
    """Reports settings that the estimator would ignore or does not support."""
    name, reading, credit = spec.estimator.plugin, estimator.reading(), spec.credit
    reads = {"turns": "the named rewards", "token_rewards": "token rewards"}
    if credit.use_kl_in_reward and reading == "turns":
        yield build_error(
            ("credit", "use_kl_in_reward"),
            f"credit.use_kl_in_reward is on, but estimator '{name}' reads only {reads['turns']}: "
            "the KL would be ignored",
            "use a penalty in the loss instead, `loss.kl`, or an estimator of token rewards, such "
            "as gae or reinforce_plus_plus",
        )
    if credit.use_kl_in_reward and reading == "scores" and credit.score_source == "structured":
        yield build_error(
            ("credit", "use_kl_in_reward"),
            f"credit.use_kl_in_reward is on, but estimator '{name}' reads only structured scores: "
            "the KL would be ignored",
            "`credit.score_source: token_rewards` makes a row's score the sum of its token "
            "rewards, KL included; or use a penalty in the loss, `loss.kl`",
        )
    if credit.score_source == "token_rewards" and reading != "scores":
        yield build_error(
            ("credit", "score_source"),
            f"credit.score_source is 'token_rewards', but estimator '{name}' reads "
            f"{reads[reading]}, not scores",
            "drop it",
        )


def check_unused_value_sources(
    spec: ExperimentSpec, estimators: Iterable[Estimator]
) -> Iterator[Diagnostic]:
    """Reports a section that provides streams, such as `critic`, if no phase's estimator uses
    them."""
    present = [
        provider
        for provider in PROVIDERS.values()
        if provider.section and getattr(spec, provider.section) is not None
    ]
    if not present:
        return
    used = list_providers({need for one in estimators for need in list_needed_streams(one)})
    for provider in present:
        if provider not in used:
            yield build_error(
                (provider.section,),
                f"estimator '{spec.estimator.plugin}' does not use {provider.origin}",
                f"drop `{provider.section}`, or use an estimator that needs it, such as "
                f"{provider.user}",
            )


def _check_task_corruption(spec: ExperimentSpec, task: Plugin) -> Iterator[Diagnostic]:
    """Reports the probe scheme `mistake` if the task cannot corrupt sentences."""
    if spec.probe and "mistake" in spec.probe.schemes and not isinstance(task, Corrupts):
        yield build_error(
            ("probe", "schemes"),
            f"probe.schemes has 'mistake', but task '{spec.task.plugin}' has no `corruption` to "
            "alter a sentence",
            "drop it; your own task can implement rlx.plugin.Corrupts",
        )


def _check_confidence_labels(spec: ExperimentSpec, estimator: Estimator) -> Iterator[Diagnostic]:
    """Reports confidences that are compared by a label that nobody gives."""
    by_label = isinstance(estimator, TwoLevel) and estimator.confidence.baseline == "label"
    label = spec.evaluation.correct
    if by_label and spec.loss.expected is None and label not in spec.rewards.turn:
        yield build_error(
            ("estimator",),
            f"estimator.confidence.baseline is 'label', but evaluation.correct is {label!r}, which "
            "is no turn reward: a confidence would have no label",
            "name a turn reward there, or in `loss.expected.of`",
        )
        return
    known = spec.rewards.turn.get(label)
    if by_label and known is not None and _is_sampled_before(spec, "confidence", known.turn):
        yield build_error(
            ("estimator",),
            f"estimator.confidence.baseline is 'label', but {label!r} scores {known.turn} turns, "
            "which are sampled after the confidence and depend on it",
            "compare with `siblings` or with the whole `prompt`",
        )


def _is_sampled_before(spec: ExperimentSpec, turn: str, other: str) -> bool:
    turns = spec.rollout.turns
    return {turn, other} <= {*turns} and turns.index(turn) < turns.index(other)


def _check_confidence_values(spec: ExperimentSpec, task: Plugin) -> Iterator[Diagnostic]:
    """Reports confidence values that are no numbers in [0, 1]."""
    if spec.loss.expected is None:
        return
    values = get_confidence_values(task)
    wrong = [text for text in values if not _is_probability(text)]
    if wrong:
        yield build_error(
            ("loss", "expected"),
            f"loss.expected sums over the confidence values of task '{spec.task.plugin}', and "
            f"{wrong[0]!r} is no number in [0, 1]",
            "correct `confidence_values` of the task plugin, or drop `loss.expected`",
        )


def _is_probability(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False


def _check_reward_spans(spec: ExperimentSpec, plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Reports rewards that read a span which their turn does not declare."""
    turns = spec.rollout.turn_specs
    for name, use in spec.rewards.turn.items():
        reward = plugins.built.get(("rewards", "turn", name))
        fits = [t for kind, t in turns.items() if use.fits(kind)]
        if isinstance(
            spec.rollout, EnvironmentRolloutSpec
        ):  # which names the kinds of its turns itself
            fits = list(turns.values())
        for span in reward.spans_read() if isinstance(reward, Reward) else ():
            declared = list(dict.fromkeys(s for turn in fits for s in turn.spans))
            if fits and span not in declared:
                what = f"turn {use.turn!r}" if use.turn != EVERY_TURN else "no turn"
                lacks = "does not declare" if use.turn != EVERY_TURN else "declares"
                yield build_error(
                    ("rewards", "turn", name, "span"),
                    f"rewards.turn.{name} reads the span {span!r}, which {what} {lacks}: no "
                    "response would have an answer",
                    suggest_name(span, declared, f"or add it to the `spans` of {use.turn!r}"),
                )


def _check_reward_turns(spec: ExperimentSpec, environment: Environment) -> Iterator[Diagnostic]:
    """Reports rewards for kinds of turn that the environment does not have."""
    kinds = environment.kinds
    for name, reward in spec.rewards.turn.items():
        if reward.turn not in (*kinds, EVERY_TURN):
            yield build_error(
                ("rewards", "turn", name, "turn"),
                f"rewards.turn.{name}.turn is {reward.turn!r}, but turns of environment "
                f"'{_environment_name(spec)}' are {', '.join(kinds)}",
                suggest_name(reward.turn, kinds, f'or "{EVERY_TURN}": every turn'),
            )


def _check_self_play(spec: ExperimentSpec, environment: Environment) -> Iterator[Diagnostic]:
    """Reports self-play in an environment that takes the turns of one player alone."""
    rollout = spec.rollout
    asked = isinstance(rollout, EnvironmentRolloutSpec) and rollout.self_play is not None
    if asked and not environment.self_play:
        yield build_error(
            ("rollout", "self_play"),
            f"environment '{_environment_name(spec)}' takes the turns of one player alone",
            "drop `self_play`; your own environment declares `self_play = True` and reads "
            "`Action.player`",
        )


def _check_live_sessions(spec: ExperimentSpec, environment: Environment) -> Iterator[Diagnostic]:
    """Reports limits of live sessions that the environment does not have."""
    rollout = spec.rollout
    if not isinstance(rollout, EnvironmentRolloutSpec):
        return
    usual = type(rollout.live)()
    given: list[tuple[str, ...]] = [
        ("rollout", "live", key) for key, value in rollout.live if value != getattr(usual, key)
    ]
    if rollout.patience is not None:
        given.append(("rollout", "patience"))
    is_pure = not isinstance(environment, StatefulEnvironment)
    for place in given:
        if is_pure or (place[-1] == "sessions" and environment.replayable):
            why = "is made of pure functions" if is_pure else "is replayable"
            key = ".".join(place)
            yield build_error(
                place,
                f"{key} has no effect: environment '{_environment_name(spec)}' {why}",
                f"drop `{place[-1]}`",
            )


def _check_agent(rollout: AgentRolloutSpec) -> Iterator[Diagnostic]:
    """Reports a program that cannot be started."""
    if rollout.function is not None:
        try:
            with show_plugin_output(rollout.function):
                load_function(rollout.function)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the code of others)
            why = f"{type(error).__name__}: {error}"
            yield build_error(
                ("rollout", "function"),
                f"rollout.function {rollout.function!r} cannot be imported: {why}",
            )
    elif rollout.command is not None and shutil.which(rollout.command[0]) is None:
        yield build_error(
            ("rollout", "command", 0),
            f"rollout.command: there is no program {rollout.command[0]!r}",
            "name a program on PATH, or the path of one",
        )


def _check_tools(rollout: EnvironmentRolloutSpec) -> Iterator[Diagnostic]:
    """Reports tools that cannot be imported, have no schema, or share a name."""
    for number, use in enumerate(rollout.tools):
        try:
            with show_plugin_output("rollout.tools"):
                list_schemas(rollout.tools[: number + 1])
        except SpecError as error:
            what = str(error).partition(": ")[2]
            yield build_error(("rollout", "tools", number), f"{_name_tool(use)}: {what}")
            return


def _name_tool(use: ToolUse) -> str:
    if isinstance(use, str):
        return f"tool {use!r}"
    return f"MCP server {use.mcp.url or ' '.join(use.mcp.command or ())!r}"


def _environment_name(spec: ExperimentSpec) -> str:
    return (
        spec.rollout.environment.plugin if isinstance(spec.rollout, EnvironmentRolloutSpec) else ""
    )


def _check_mask_reach(spec: ExperimentSpec, mask: Mask) -> Iterator[Diagnostic]:
    """Reports a mask that includes environment tokens if their log-probabilities are unknown."""
    learns = isinstance(spec.rollout, MultiTurnRolloutSpec) and mask.reaches_beyond()
    if learns and spec.loss.old_logprobs != "learner":
        yield build_error(
            ("mask",),
            f"mask strategy '{spec.mask.plugin}' trains on the environment's tokens, which were "
            "not sampled: their behaviour log-probabilities are unknown",
            "`loss.old_logprobs: learner` computes them",
        )


def _check_turns_without_spans(spec: ExperimentSpec, mask: Mask) -> Iterator[Diagnostic]:
    """Reports turns whose tokens are all masked out, whatever the model generates."""
    if not isinstance(mask, TurnSpans) or mask.fallback != "none":
        return
    if not any(turn.spans for turn in spec.rollout.turn_specs.values()):
        yield build_error(
            ("mask", "fallback"),
            "mask.fallback is 'none', and no turn declares spans: nothing ever learns",
            "name the tags of a turn under its `spans`, or `fallback: response`",
        )
    for level in spec.rollout.list_levels():
        if not level.turn.spans:
            yield build_warning(
                ("mask", "fallback"),
                f"mask.fallback is 'none', and {level.key} declares no spans: no {level.kind} ever "
                "learns",
                f"name its tags under {level.key}.spans, or `fallback: response`",
            )


def _check_groups_of_one(spec: ExperimentSpec, estimator: Estimator) -> Iterator[Diagnostic]:
    """Reports turns without siblings, if the estimator compares siblings.

    If every phase has a `set`, only the resolved phases matter.
    """
    if all(phase.set for phase in spec.phases):
        return
    alone = [level for level in spec.rollout.list_levels() if level.count == 1]
    refused = [level for level in alone if estimator.refuses_one(level.kind)]
    silent = [one for one in alone if one not in refused and estimator.compares(one.kind)]
    for level in refused:
        yield build_error(
            ("rollout", *level.counted_at),
            f"{level.count_key} is 1, and `singleton: refuse` of estimator "
            f"'{spec.estimator.plugin}' does not allow a group of one",
            "sample 2 or more, or choose `singleton: zero` or `singleton: raw`",
        )
    if len(silent) == len(spec.rollout.turns) and _learns_from_advantages(spec):
        keys = [level.count_key for level in silent]
        yield build_error(
            ("rollout", *silent[0].counted_at),
            f"{' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} 1, and estimator "
            f"'{spec.estimator.plugin}' compares siblings: a group of one has no signal, so "
            "nothing learns",
            _MORE_SIBLINGS,
        )
    for level in silent if spec.learns_from_rewards else ():
        yield build_warning(
            ("rollout", *level.counted_at),
            f"{level.count_key} is 1, and estimator '{spec.estimator.plugin}' compares "
            f"siblings: a group of one has no signal, so no {level.kind} learns",
            _MORE_SIBLINGS,
        )


def _check_greedy_groups(spec: ExperimentSpec, estimator: Estimator) -> Iterator[Diagnostic]:
    """Reports siblings that are all equal, because they are decoded greedily."""
    if all(phase.set for phase in spec.phases) or isinstance(spec.rollout, MultiTurnRolloutSpec):
        return
    levels = spec.rollout.list_levels()
    compared = [level for level in levels if estimator.compares(level.kind)]
    greedy = [level for level in compared if level.turn.top_k == 1 and level.count > 1]
    silent = len([level for level in compared if level.count == 1 or level in greedy])
    nothing = silent == len(levels) and _learns_from_advantages(spec)
    for level in greedy if spec.learns_from_rewards else ():
        yield (build_error if nothing else build_warning)(
            ("rollout", *level.at, "top_k"),
            f"{level.key}.top_k is 1, so the {level.count} samples of a group are equal, and "
            f"estimator '{spec.estimator.plugin}' compares them: no {level.kind} learns",
            "top_k: 0 samples from the full distribution",
            against=("rollout", *level.counted_at),
        )


_MORE_SIBLINGS = "sample 2 or more, or let a group of one keep its raw score: `singleton: raw`"


def _learns_from_advantages(spec: ExperimentSpec) -> bool:
    """Whether nothing in the loss has a gradient where every advantage is 0."""
    loss = spec.loss
    return loss.entropy is None and loss.expected is None and not spec.learns_from_teacher


def _check_level_factors(spec: ExperimentSpec, estimator: Estimator) -> Iterator[Diagnostic]:
    """Reports factors of the two levels with which every advantage is 0."""
    if not isinstance(estimator, TwoLevel) or not _learns_from_advantages(spec):
        return
    factors = {"answer": "lambda_ans", "confidence": "lambda_conf"}
    used = {factors[turn] for turn in spec.rollout.turns if turn in factors}
    zeros = [name for name in factors.values() if getattr(estimator, name) == 0]
    if used and used <= set(zeros):
        names = " and ".join(f"estimator.{name}" for name in zeros)
        yield build_error(
            ("estimator", zeros[0]),
            f"{names} {'is' if len(zeros) == 1 else 'are'} 0: every advantage would be 0",
            "give one of the levels a factor other than 0",
        )


def _check_ignored_settings(spec: ExperimentSpec, estimator: Estimator) -> Iterator[Diagnostic]:
    """Yields settings that have no effect, and a profile with a surprising side effect."""
    credit, reading = spec.credit, estimator.reading()
    blind = reading == "turns" or (reading == "scores" and credit.score_source == "structured")
    placement = credit.placement and credit.placement.plugin
    for key, silent, value in (
        ("placement", None, placement),
        ("turn_reduce", None, credit.turn_reduce),
        ("on_missing_turn", "drop", credit.on_missing_turn),
    ):
        if value != silent and blind:
            yield build_warning(
                ("credit", key),
                f"credit.{key} is {value!r}, but estimator '{spec.estimator.plugin}' reads no "
                "token rewards: it changes the stored token_level_scores, but no advantage",
            )
    conventions = PROFILES[credit.profile]
    if conventions and not conventions.keys() & type(estimator).model_fields.keys():
        yield build_warning(
            ("credit", "profile"),
            f"credit.profile {credit.profile!r} does not apply to estimator "
            f"'{spec.estimator.plugin}': the profile sets none of its options",
        )
    if spec.rollout.dynamic_sampling is not None and not estimator.compares(spec.rollout.turns[0]):
        yield build_warning(
            ("rollout", "dynamic_sampling"),
            f"rollout.dynamic_sampling replaces trees whose scores agree, but estimator "
            f"'{spec.estimator.plugin}' can learn from those too",
        )
    if credit.canonical_profile == "kg_r1" and credit.placement is None and not blind:
        default = credit.resolved_placement.plugin
        mass = "the sum" if credit.use_kl_in_reward else "the mean"
        state = "on" if credit.use_kl_in_reward else "off"
        yield build_warning(
            ("credit", "profile"),
            f"credit.profile {credit.profile!r} places rewards by {default} "
            "because KL in "
            f"the reward is {state}: a rollout's tokens carry {mass} of its turn rewards, and "
            "turning KL on or off would change that; set `credit.placement` to fix it",
        )


def collect_spec_warnings(spec: ExperimentSpec, plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Yields the plugins' own warnings, and those about settings without effect."""
    estimator = cast(Estimator, plugins.built["estimator",])
    for place, plugin in plugins.list_all():
        with show_plugin_output(place.name):
            texts = plugin.warnings()
        for text in texts:
            yield build_warning(_find_option_path(place.path, plugin, text), text)
    yield from _check_ignored_settings(spec, estimator)
    forced = (
        spec.rollout.forced_answer if isinstance(spec.rollout, EnvironmentRolloutSpec) else None
    )
    if forced is not None and "{prompt}" in forced.template:
        yield build_warning(
            ("rollout", "forced_answer", "template"),
            "rollout.forced_answer.template has {prompt}, which is not filled in here: the "
            "problem was shown before the first turn",
        )
    yield from find_cautions(spec)


def _find_option_path(path: KeyPath, plugin: Plugin, text: str) -> KeyPath:
    """The key that a plugin's warning begins with, such as `numeric` or `estimator.confidence`;
    otherwise the plugin's own."""
    word = text.split()[0] if text.split() else ""
    if path and word.startswith(f"{path[0]}."):
        return tuple(word.split("."))
    return (*path, word) if word in type(plugin).model_fields else path


_SIGMA = "divides by a σ that contains the rollout's own score"
_SHARES = (
    "adds up rewards from a token on, while turn_proportional places shares of what the token "
    "earns before it"
)
_DISCOUNT = "γ below 1 discounts what comes later"
_CRITIC = "λ below 1 is unbiased only if the critic is exact"
_WHITENED = "whitens over the batch: a long rollout decides more of the mean and of σ"
_TURNS = (
    "credits a turn with its own reward and not with later ones, relative to a mean over turns "
    "that the policy chose to take"
)
_SAFE_ESTIMATORS = "unbiased: rloo, dr_grpo, or gae with `placement: turn_end`, λ = 1, no whitening"
_SAFE_LOSSES = "unbiased: `loss.aggregate: sequence_sum` or `constant`, with `loss.ratio: token`"


@dataclass(frozen=True, slots=True)
class Bias:
    """A cause of bias.

    Attributes:
        of: the estimator, or the loss.
        reason: what it does, in words that follow "the estimator" or "loss.".
        applies: whether options bring it about.
        placements: those under which it holds; empty for all.
    """

    of: type[Estimator] | type[LossSpec]
    reason: str
    applies: Callable[[Any], bool] = lambda options: True
    placements: tuple[str, ...] = ()


def _divides(options: Any) -> bool:
    return options.normalize in ("std", "batch_std")


def _whitens(options: Any) -> bool:
    return bool(options.whiten)


BIASES: tuple[Bias, ...] = (
    Bias(Grpo, _TURNS, lambda o: o.enable_multiturn_advantage),
    Bias(Grpo, _SIGMA, _divides),
    Bias(Uniform, _SIGMA),
    Bias(Gdpo, "divides each reward by a σ that contains the rollout's own", _divides),
    Bias(
        Gdpo,
        "normalizes the sum over the batch, by a σ that contains the rollout's own",
        lambda o: o.renormalize != "none",
    ),
    Bias(Opo, "weighs its baseline by lengths, the rollout's own score included"),
    Bias(Gpg, "scales by the number of nonzero scores", lambda o: o.alpha == "scores"),
    Bias(MaxRl, "divides by a mean that contains the rollout's own score"),
    Bias(PassAtK, "follows another objective: only the best rollout of a group learns"),
    Bias(Remax, _SHARES, lambda o: o.returns == "to_go", ("turn_proportional",)),
    Bias(MultiturnGrpo, _TURNS),
    Bias(MtGrpo, "divides the first turn's reward and the outcome by two different σ"),
    Bias(Gigpo, _SIGMA, _divides),
    Bias(
        Gigpo,
        "weighs a state by how many rollouts of the group come to it",
        lambda o: o.omega != 0,
    ),
    Bias(TreeGrpo, _SIGMA, _divides),
    Bias(TwoLevel, _SIGMA, _divides),
    Bias(ReinforcePlusPlus, _SHARES, placements=("turn_proportional",)),
    Bias(ReinforcePlusPlus, _DISCOUNT, lambda o: o.gamma < 1),
    Bias(ReinforcePlusPlus, _WHITENED, _whitens),
    Bias(ReinforcePlusPlusBaseline, _WHITENED, _whitens),
    Bias(Gae, _SHARES, placements=("turn_proportional",)),
    Bias(Gae, _DISCOUNT, lambda o: o.gamma < 1),
    Bias(Gae, _CRITIC, lambda o: o.lam < 1),
    Bias(Gae, _WHITENED, _whitens),
    Bias(TurnLevelGae, _SHARES, placements=("turn_proportional",)),
    Bias(TurnLevelGae, _DISCOUNT, lambda o: min(o.gamma, o.gamma_high) < 1),
    Bias(TurnLevelGae, _CRITIC, lambda o: min(o.lam, o.lam_high) < 1),
    Bias(TurnLevelGae, _WHITENED, _whitens),
    Bias(
        OptimalTokenBaseline,
        "compares with those that reach the same step, the rollout's own return included",
    ),
    Bias(
        LossSpec,
        "aggregate: token_mean divides by the tokens of the step, the rollout's own included",
        lambda o: o.aggregate == "token_mean",
    ),
    Bias(
        LossSpec,
        "aggregate: sequence_mean divides a rollout's gradient by its own length",
        lambda o: o.aggregate == "sequence_mean",
    ),
    Bias(
        LossSpec,
        "ratio: sequence is a mean over the rollout's own tokens",
        lambda o: o.ratio == "sequence",
    ),
)
"""Every known cause. Estimators that no cause names are unbiased, or not shipped with rlx."""


def list_bias_reasons(options: Estimator | LossSpec, placement: str) -> list[str]:
    """The reasons why an estimator or a loss with these options is biased; empty if there are none.

    Args:
        options: of the estimator, or the `loss` section.
        placement: name of the placement of rewards.
    """
    return [
        bias.reason
        for bias in BIASES
        if type(options) is bias.of
        and bias.applies(options)
        and placement in (bias.placements or (placement,))
    ]


def find_stopping_bias(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields a warning if the policy may end its rollouts and estimator or loss are biased."""
    rollout = spec.rollout
    if not isinstance(rollout, MultiTurnRolloutSpec) or rollout.has_one_turn:
        return
    placement = spec.credit.resolved_placement.plugin
    estimator = list_bias_reasons(resolve_plugins(spec).estimator, placement)
    loss = list_bias_reasons(spec.loss, placement)
    if not estimator and not loss:
        return
    names = [f"estimator '{spec.estimator.plugin}'"] * bool(estimator) + ["the loss"] * bool(loss)
    warning = build_warning(
        ("estimator",) if estimator else ("loss", "aggregate"),
        f"{' and '.join(names)} {'are' if len(names) == 2 else 'is'} biased if the policy decides "
        "when to stop: the expected gradient is not that of the expected return",
        _SAFE_ESTIMATORS if estimator else "",
        _SAFE_LOSSES if loss else "",
        against=("loss",),
    )
    notes = [f"the estimator {reason}" for reason in estimator]
    notes += [f"loss.{reason}" for reason in loss]
    yield replace(warning, notes=(*notes, "experiments/bias/bias.md shows how large each bias is"))
