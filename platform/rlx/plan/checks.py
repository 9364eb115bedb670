"""Reads and checks a whole experiment: its values, its plugins and their fit, in every phase."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rlx.discovery import (
    DEMONSTRATIONS,
    NEEDS,
    PROVIDERS,
    BuiltPlugins,
    ExperimentPlugins,
    build_named_plugins,
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
    KeyPath,
    MultiTurnRolloutSpec,
    PhaseSpec,
    TurnSpans,
    TwoLevel,
    find_cautions,
    find_contradictions,
    get_at_path,
    has_path,
)
from rlx.spec.reading import (
    Diagnostic,
    InvalidSpec,
    LoadedSpec,
    YamlDocument,
    build_error,
    build_refusal,
    build_warning,
    format_key_path,
    locate_diagnostic,
    read_document,
    read_own_values,
    relocate_phase_fault,
    suggest_name,
    validate_values,
)

_OF_VALUES = ("unknown_key", "value", "plugin")
"""Kinds of fault that one value has, whatever the others are."""


def read_spec(path: Path, overrides: Sequence[str] = ()) -> LoadedSpec:
    """Reads and validates one experiment with overrides, `path.to.key=value`, without its plugins;
    raises InvalidSpec with every error, and SpecError for a file that cannot be opened."""
    return validate_document(read_document(path, overrides))


def validate_document(document: YamlDocument) -> LoadedSpec:
    """Validates a document as an experiment, without its plugins; raises InvalidSpec with every
    error."""
    spec, faults = check_spec_tree(document.tree)
    if faults or spec is None:
        raise document.build_refusal(faults)
    return LoadedSpec(document, spec)


def check_read_spec(read: LoadedSpec) -> ExperimentPlugins:
    """Builds an experiment's plugins, and checks that they fit it and each other in every phase;
    raises InvalidSpec with every fault, InvalidPlugins if only plugins are at fault."""
    spec = read.spec
    plugins, found = _check_plugins(spec)

    def check_phase(phase: PhaseSpec) -> Iterator[Diagnostic]:
        for fault in _check_plugins(spec.resolve_phase_spec(phase))[1]:
            if fault.path[:1] != ("model",):  # the model is built once, before any phase
                yield fault

    found += find_in_phases(spec, found, check_phase)
    if not _list_errors(found):
        phases = (resolve_plugins(spec.resolve_phase_spec(phase)) for phase in spec.phases)
        found += check_unused_value_sources(spec, (each.estimator for each in phases))
    if faults := _list_errors(found):
        raise read.document.build_refusal(faults)
    warnings = tuple(locate_diagnostic(warning, read.document) for warning in found)
    return replace(plugins.to_experiment(spec), warnings=warnings)


def check_file(
    source: Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> tuple[LoadedSpec, ExperimentPlugins]:
    """Reads and checks one experiment, a file or its content, with its plugins; raises as
    `read_spec` and `check_read_spec` do, with the faults of both together."""
    try:
        document = read_document(source, overrides)
    except InvalidSpec as error:
        others = _check_without_base(source) if isinstance(source, Path) else ()
        raise build_refusal([*error.diagnostics, *others], error.file) from None
    spec, faults = check_spec_tree(document.tree)
    if spec is not None and not faults:
        read = LoadedSpec(document, spec)
        return read, check_read_spec(read)
    if spec is not None:
        faults += _list_errors(_check_plugins(spec)[1])
    else:
        plugins = build_named_plugins(document.tree)
        faults += [*plugins.faults, *check_parent_rewards(plugins)]
    raise document.build_refusal(faults)


def _check_without_base(path: Path) -> Iterator[Diagnostic]:
    """Yields the errors of a file that no base could mend, where its base cannot be read: what it
    leaves out, contradicts or sets to null may be right with its base."""
    try:
        document = read_own_values(path)
    except InvalidSpec:
        return  # it is the file that cannot be read
    if document is None:
        return
    for fault in (
        *validate_values(ExperimentSpec, document.tree)[1],
        *build_named_plugins(document.tree).faults,
    ):
        written = get_at_path(document.tree, fault.path)
        if fault.kind in _OF_VALUES and written is not None:
            yield locate_diagnostic(fault, document)


def _check_plugins(spec: ExperimentSpec) -> tuple[BuiltPlugins, list[Diagnostic]]:
    """Builds the plugins of one spec, without its phases, and lists errors or, without any,
    warnings."""
    plugins = build_named_plugins(spec.dump_resolved())
    found = [
        *plugins.faults,
        *check_parent_rewards(plugins),
        *check_needed_streams(spec, plugins),
        *check_plugin_fit(spec, plugins),
    ]
    errors = _list_errors(found)
    return plugins, errors or [*found, *collect_spec_warnings(spec, plugins)]


def _list_errors(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    return [one for one in found if one.severity == "error"]


def check_spec_tree(tree: Any) -> tuple[ExperimentSpec | None, list[Diagnostic]]:
    """Returns the experiment that a tree holds, None if it holds none, and every error in it."""
    spec, faults = validate_values(ExperimentSpec, tree)
    if spec is None:
        return None, [*faults, *_find_hidden_errors(tree, faults)]
    return spec, list(_find_spec_errors(spec))


def _find_spec_errors(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields values that contradict each other, and what a phase's `set` makes invalid; what a
    phase shares with the experiment once."""

    def check_phase(phase: PhaseSpec) -> Iterator[Diagnostic]:
        resolved, faults = validate_values(ExperimentSpec, spec.apply_phase(phase)[0])
        yield from faults if resolved is None else find_contradictions(resolved)

    own = [*find_contradictions(spec), *_check_phase_settings(spec)]
    yield from own
    yield from find_in_phases(spec, own, check_phase)


def _check_phase_settings(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields names that phases share, and entries of `set` that cannot be applied, or that a later
    entry replaces as a whole."""
    names: set[str] = set()
    for number, phase in enumerate(spec.phases):
        at: KeyPath = ("phases", number)
        if phase.name in names:
            message = f"phases.{number}.name is {phase.name!r}, the name of an earlier phase"
            yield build_error((*at, "name"), message)
        names.add(phase.name)
        for setting in spec.apply_phase(phase)[1]:
            yield build_error(
                (*at, "set", setting.path),
                f"{setting.message} (phase '{phase.name}')",
                suggest_name(setting.path, setting.choices),
                kind="unknown_key",
            )
        keys = list(phase.set)
        for place, key in enumerate(keys):
            if whole := next((k for k in keys[place + 1 :] if key.startswith(f"{k}.")), ""):
                message = f"{key!r} has no effect: {whole!r} replaces it (phase '{phase.name}')"
                yield build_error((*at, "set", key), message, f"write it after {whole!r}, or in it")


def find_in_phases(
    spec: ExperimentSpec,
    own: Sequence[Diagnostic],
    check: Callable[[PhaseSpec], Iterable[Diagnostic]],
) -> Iterator[Diagnostic]:
    """Yields what `check` finds in phases with a `set`, located at the setting that causes it, but
    not what the experiment itself has, which is its `own`."""
    known = {(found.path, found.message) for found in own}
    faulty = {found.path for found in own if found.severity == "error"}
    for number, phase in enumerate(spec.phases):
        keys = [tuple(key.split(".")) for key in phase.set]
        for found in check(phase) if keys else ():
            paths = [tuple(map(str, path)) for path in (found.path, found.against) if path]
            is_set = any(_has_path_overlap(key, path) for key in keys for path in paths)
            follows = found.path in faulty and not is_set
            if (found.path, found.message) not in known and not follows:
                yield relocate_phase_fault(found, number, phase)


# Plugins that fit the spec and each other, and settings that are silently ignored -----------------
def check_parent_rewards(plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Reports a missing `of`, or one that the reward does not read."""
    rewards = [place for place in plugins.places if place.path[0] == "rewards"]
    for place in (place for place in rewards if place.path in plugins.built):
        label = format_key_path(place.path)
        reads = getattr(plugins.built[place.path], "reads_parent", False)
        if reads and place.of is None:
            yield build_error(
                place.path,
                f"{label} needs `of`: {place.name!r} reads the value of another reward",
                f"of: {next((str(u.path[-1]) for u in rewards if u is not place), 'NAME')}",
            )
        if not reads and place.of is not None:
            yield build_error(
                (*place.path, "of"),
                f"{label}.of is {place.of!r}, but {place.name!r} reads no other reward",
                "drop `of`; your own plugin can read it if declared as "
                "`@reward(reads_parent=True)`",
            )


def check_needed_streams(spec: ExperimentSpec, plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Reports streams that a plugin or warm start needs and the experiment does not provide."""
    needs: list[tuple[KeyPath, str, str]] = []
    for place, plugin in plugins.list_all():
        for name in list_needed_streams(plugin):
            if name in NEEDS:
                needs.append((place.name_path, place.label, name))
                continue
            help_ = suggest_name(name, NEEDS, f"there are: {', '.join(NEEDS)}")
            what = f"needs '{name}', which is not an rlx stream"
            found = find_installed_plugin(place.kind, place.name)
            yield replace(build_plugin_diagnostic(found, what, (help_,)), path=place.name_path)
    start: KeyPath = ("model", "warm_start")
    if spec.model.warm_start is not None:
        rollout = spec.rollout
        several = isinstance(rollout, EnvironmentRolloutSpec) and not rollout.has_one_turn
        needs.append((start, "model.warm_start", "lessons" if several else "demonstrations"))
    task = plugins.built.get(("task",))
    worked = plugins.built.get(DEMONSTRATIONS, task)
    for path, who, name in needs:
        provider, source = NEEDS[name], worked if path == start else task
        if source is not None and not provider.is_present(spec, source):
            has_none = f"which {provider.origin} provides: this experiment has none"
            yield build_error(path, f"{who} needs {name}, {has_none}", provider.help)


def check_plugin_fit(spec: ExperimentSpec, plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Yields conflicts between the spec and those of its plugins that could be built."""
    built, rollout = plugins.built, spec.rollout
    if made := built.get(("estimator",)):
        estimator = cast(Estimator, made)
        yield from _check_kl_and_scores(spec, estimator)
        yield from _check_groups(spec, estimator)
        if isinstance(estimator, TwoLevel):
            yield from _check_two_level(spec, estimator)
    if task := built.get(("task",)):
        yield from _check_task(spec, task)
    if mask := built.get(("mask",)):
        yield from _check_mask(spec, cast(Mask, mask))
    yield from _check_spans_read(spec, plugins)
    if isinstance(rollout, EnvironmentRolloutSpec):
        if environment := built.get(("rollout", "environment")):
            yield from _check_environment(spec, rollout, cast(Environment, environment))
        yield from _check_tools(rollout)
    elif isinstance(rollout, AgentRolloutSpec):
        yield from _check_agent(rollout)


def _check_kl_and_scores(spec: ExperimentSpec, estimator: Estimator) -> Iterator[Diagnostic]:
    name, reading, credit = spec.estimator.plugin, estimator.reading(), spec.credit
    reads = {"turns": "the named rewards", "token_rewards": "token rewards"}
    from_scores = reading == "scores" and credit.score_source == "structured"
    if credit.use_kl_in_reward and (from_scores or reading == "turns"):
        ways = "use a penalty in the loss, `loss.kl`, or an estimator of token rewards, such as gae"
        if from_scores:
            ways += "; `credit.score_source: token_rewards` also counts the KL"
        yield build_error(
            ("credit", "use_kl_in_reward"),
            f"credit.use_kl_in_reward is on, but estimator '{name}' reads only "
            f"{reads.get(reading, 'structured scores')}: the KL would be ignored",
            ways,
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
    them; reads `estimators` only where there is one."""
    sections = [one for one in PROVIDERS.values() if one.section]
    present = [one for one in sections if getattr(spec, one.section) is not None]
    if not present:
        return
    used = list_providers({need for one in estimators for need in list_needed_streams(one)})
    for provider in (one for one in present if one not in used):
        yield build_error(
            (provider.section,),
            f"estimator '{spec.estimator.plugin}' does not use {provider.origin}",
            f"drop `{provider.section}`, or use an estimator that needs it, such as "
            f"{provider.user}",
        )


def _check_task(spec: ExperimentSpec, task: Plugin) -> Iterator[Diagnostic]:
    name = spec.task.plugin
    if spec.probe and "mistake" in spec.probe.schemes and not isinstance(task, Corrupts):
        yield build_error(
            ("probe", "schemes"),
            f"probe.schemes has 'mistake', but task '{name}' has no `corruption` to "
            "alter a sentence",
            "drop it; your own task can implement rlx.plugin.Corrupts",
        )
    texts = get_confidence_values(task) if spec.loss.expected is not None else ()
    if (wrong := next((text for text in texts if not _is_probability(text)), None)) is not None:
        yield build_error(
            ("loss", "expected"),
            f"loss.expected sums over the confidence values of task '{name}', and {wrong!r} is no "
            "number in [0, 1]",
            "correct `confidence_values` of the task plugin, or drop `loss.expected`",
        )


def _is_probability(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False


def _check_two_level(spec: ExperimentSpec, estimator: TwoLevel) -> Iterator[Diagnostic]:
    """Reports confidences that are compared by a label that nobody gives, and factors of the two
    levels with which every advantage is 0."""
    label, turns = spec.evaluation.correct, spec.rollout.turns
    by_label, known = estimator.confidence.baseline == "label", spec.rewards.turn.get(label)
    if by_label and known is None and spec.loss.expected is None:
        yield build_error(
            ("estimator",),
            f"estimator.confidence.baseline is 'label', but evaluation.correct is {label!r}, which "
            "is no turn reward: a confidence would have no label",
            "name a turn reward there, or in `loss.expected.of`",
        )
    later = turns[turns.index("confidence") + 1 :] if "confidence" in turns else ()
    if by_label and known is not None and known.turn in later:
        yield build_error(
            ("estimator",),
            f"estimator.confidence.baseline is 'label', but {label!r} scores {known.turn} turns, "
            "which are sampled after the confidence and depend on it",
            "compare with `siblings` or with the whole `prompt`",
        )
    factors = {"answer": "lambda_ans", "confidence": "lambda_conf"}
    used = {factors[turn] for turn in turns if turn in factors}
    zeros = [name for name in factors.values() if getattr(estimator, name) == 0]
    if used and used <= {*zeros} and _learns_from_advantages(spec):
        names = " and ".join(f"estimator.{name}" for name in zeros)
        yield build_error(
            ("estimator", zeros[0]),
            f"{names} {'is' if len(zeros) == 1 else 'are'} 0: every advantage would be 0",
            "give one of the levels a factor other than 0",
        )


def _check_spans_read(spec: ExperimentSpec, plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    names_kinds = isinstance(spec.rollout, EnvironmentRolloutSpec)  # of its turns, itself
    for name, use in spec.rewards.turn.items():
        reward = plugins.built.get(("rewards", "turn", name))
        fits = [t for kind, t in spec.rollout.turn_specs.items() if names_kinds or use.fits(kind)]
        declared = list(dict.fromkeys(span for turn in fits for span in turn.spans))
        what = f"turn {use.turn!r} does not declare"
        if use.turn == EVERY_TURN:
            what = "no turn declares"
        for span in reward.spans_read() if isinstance(reward, Reward) else ():
            if fits and span not in declared:
                yield build_error(
                    ("rewards", "turn", name, "span"),
                    f"rewards.turn.{name} reads the span {span!r}, which {what}: no "
                    "response would have an answer",
                    suggest_name(span, declared, f"or add it to the `spans` of {use.turn!r}"),
                )


def _check_environment(
    spec: ExperimentSpec, rollout: EnvironmentRolloutSpec, environment: Environment
) -> Iterator[Diagnostic]:
    kinds, who = environment.kinds, f"environment '{rollout.environment.plugin}'"
    for name, reward in spec.rewards.turn.items():
        if reward.turn not in (*kinds, EVERY_TURN):
            yield build_error(
                ("rewards", "turn", name, "turn"),
                f"rewards.turn.{name}.turn is {reward.turn!r}, but turns of {who} are "
                f"{', '.join(kinds)}",
                suggest_name(reward.turn, kinds, f'or "{EVERY_TURN}": every turn'),
            )
    if rollout.self_play is not None and not environment.self_play:
        yield build_error(
            ("rollout", "self_play"),
            f"{who} takes the turns of one player alone",
            "drop `self_play`; your own environment declares `self_play = True` and reads "
            "`Action.player`",
        )
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
            message = f"{'.'.join(place)} has no effect: {who} {why}"
            yield build_error(place, message, f"drop `{place[-1]}`")


def _check_agent(rollout: AgentRolloutSpec) -> Iterator[Diagnostic]:
    if rollout.function is not None:
        try:
            with show_plugin_output(rollout.function):
                load_function(rollout.function)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the code of others)
            what = f"rollout.function {rollout.function!r} cannot be imported"
            message = f"{what}: {type(error).__name__}: {error}"
            yield build_error(("rollout", "function"), message)
    elif rollout.command is not None and shutil.which(rollout.command[0]) is None:
        yield build_error(
            ("rollout", "command", 0),
            f"rollout.command: there is no program {rollout.command[0]!r}",
            "name a program on PATH, or the path of one",
        )


def _check_tools(rollout: EnvironmentRolloutSpec) -> Iterator[Diagnostic]:
    for number, use in enumerate(rollout.tools):
        try:
            with show_plugin_output("rollout.tools"):
                list_schemas(rollout.tools[: number + 1])
        except SpecError as error:
            name = f"tool {use!r}"
            if not isinstance(use, str):
                name = f"MCP server {use.mcp.url or ' '.join(use.mcp.command or ())!r}"
            message = f"{name}: {str(error).partition(': ')[2]}"
            yield build_error(("rollout", "tools", number), message)
            return


def _check_mask(spec: ExperimentSpec, mask: Mask) -> Iterator[Diagnostic]:
    """Reports a mask that includes environment tokens if their log-probabilities are unknown, and
    turns whose tokens are all masked out, whatever the model generates."""
    rollout = spec.rollout
    learns = isinstance(rollout, MultiTurnRolloutSpec) and mask.reaches_beyond()
    if learns and spec.loss.old_logprobs != "learner":
        yield build_error(
            ("mask",),
            f"mask strategy '{spec.mask.plugin}' trains on the environment's tokens, which were "
            "not sampled: their behaviour log-probabilities are unknown",
            "`loss.old_logprobs: learner` computes them",
        )
    if not isinstance(mask, TurnSpans) or mask.fallback != "none":
        return
    if not any(turn.spans for turn in rollout.turn_specs.values()):
        yield build_error(
            ("mask", "fallback"),
            "mask.fallback is 'none', and no turn declares spans: nothing ever learns",
            "name the tags of a turn under its `spans`, or `fallback: response`",
        )
    for level in rollout.list_levels():
        if not level.turn.spans:
            yield build_warning(
                ("mask", "fallback"),
                f"mask.fallback is 'none', and {level.key} declares no spans: no {level.kind} ever "
                "learns",
                f"name its tags under {level.key}.spans, or `fallback: response`",
            )


def _check_groups(spec: ExperimentSpec, estimator: Estimator) -> Iterator[Diagnostic]:
    """Reports turns whose siblings are missing, or equal because they are decoded greedily; not if
    every phase has a `set`, since only the resolved phases matter then.
    """
    if all(phase.set for phase in spec.phases):
        return
    levels, name = spec.rollout.list_levels(), f"estimator '{spec.estimator.plugin}'"
    refused = [v for v in levels if v.count == 1 and estimator.refuses_one(v.kind)]
    compared = [v for v in levels if v not in refused and estimator.compares(v.kind)]
    alone = [level for level in compared if level.count == 1]
    greedy = [level for level in compared if level.turn.top_k == 1 and level.count > 1]
    if isinstance(spec.rollout, MultiTurnRolloutSpec):
        greedy = []  # an environment may answer equal turns differently
    for level in refused:
        yield build_error(
            ("rollout", *level.counted_at),
            f"{level.count_key} is 1, and `singleton: refuse` of {name} does not allow a group of "
            "one",
            "sample 2 or more, or choose `singleton: zero` or `singleton: raw`",
        )
    no_signal = f"1, and {name} compares siblings: a group of one has no signal, so"
    more = "sample 2 or more, or let a group of one keep its raw score: `singleton: raw`"
    if len(alone) == len(levels) and _learns_from_advantages(spec):
        keys = " and ".join(level.count_key for level in alone)
        message = f"{keys} {'is' if len(alone) == 1 else 'are'} {no_signal} nothing learns"
        yield build_error(("rollout", *alone[0].counted_at), message, more)
    if not spec.learns_from_rewards:
        return
    for level in alone:
        message = f"{level.count_key} is {no_signal} no {level.kind} learns"
        yield build_warning(("rollout", *level.counted_at), message, more)
    nothing = len(alone) + len(greedy) == len(levels) and _learns_from_advantages(spec)
    for level in greedy:
        yield (build_error if nothing else build_warning)(
            ("rollout", *level.at, "top_k"),
            f"{level.key}.top_k is 1, so the {level.count} samples of a group are equal, and "
            f"{name} compares them: no {level.kind} learns",
            "top_k: 0 samples from the full distribution",
            against=("rollout", *level.counted_at),
        )


def _learns_from_advantages(spec: ExperimentSpec) -> bool:
    """Whether nothing in the loss has a gradient where every advantage is 0."""
    loss = spec.loss
    return loss.entropy is None and loss.expected is None and not spec.learns_from_teacher


def collect_spec_warnings(spec: ExperimentSpec, plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Yields the plugins' own warnings, at the key that each begins with, such as `numeric` or
    `estimator.confidence`, and those about settings without effect."""
    for place, plugin in plugins.list_all():
        with show_plugin_output(place.name):
            texts = plugin.warnings()
        for text in texts:
            path, word = place.path, next(iter(text.split()), "")
            if path and word.startswith(f"{path[0]}."):
                path = tuple(word.split("."))
            elif word in type(plugin).model_fields:
                path = (*path, word)
            yield build_warning(path, text)
    yield from _check_ignored_settings(spec, cast(Estimator, plugins.built["estimator",]))
    yield from find_cautions(spec)


def _check_ignored_settings(spec: ExperimentSpec, estimator: Estimator) -> Iterator[Diagnostic]:
    credit, reading, who = spec.credit, estimator.reading(), f"estimator '{spec.estimator.plugin}'"
    blind = reading == "turns" or (reading == "scores" and credit.score_source == "structured")
    for key, silent, value in (
        ("placement", None, credit.placement and credit.placement.plugin),
        ("turn_reduce", None, credit.turn_reduce),
        ("on_missing_turn", "drop", credit.on_missing_turn),
    ):
        if value != silent and blind:
            yield build_warning(
                ("credit", key),
                f"credit.{key} is {value!r}, but {who} reads no token rewards: it changes the "
                "stored token_level_scores, but no advantage",
            )
    conventions = PROFILES[credit.profile]
    if conventions and not conventions.keys() & type(estimator).model_fields.keys():
        yield build_warning(
            ("credit", "profile"),
            f"credit.profile {credit.profile!r} does not apply to {who}: the profile sets none of "
            "its options",
        )
    if spec.rollout.dynamic_sampling is not None and not estimator.compares(spec.rollout.turns[0]):
        yield build_warning(
            ("rollout", "dynamic_sampling"),
            f"rollout.dynamic_sampling replaces trees whose scores agree, but {who} can learn from "
            "those too",
        )


# Recovery --------------------------------------------------------------------------------------


_PLACEHOLDERS: Mapping[str, Any] = {
    "name": "name",
    "model": {"kind": "tiny"},
    "task": {"plugin": "none"},
    "phases": [{"name": "phase", "steps": 1}],
}
"""Values that let validation go on where a required section is missing."""
_KIND_KEYS = ("kind", "schedule", "engine")
"""Keys that select which other keys a section has."""
_ROUNDS = 4
"""Removing a required key makes its section invalid, then the one above it."""


def _find_hidden_errors(tree: Any, faults: Sequence[Diagnostic]) -> Iterator[Diagnostic]:
    """Yields errors among the valid values, which validation does not reach after `faults`: in a
    copy, misspelt keys and kinds become those that were probably meant, and malformed values are
    removed. Errors that concern these are dropped."""
    mended = deepcopy(tree)
    guessed = {(*fault.path[:-1], fault.meant) for fault in faults if fault.meant}
    reported = {(fault.path, fault.message) for fault in faults}
    left_out: set[KeyPath] = set()
    wrong = list(faults)
    for _ in range(_ROUNDS):
        left_out |= {path for fault in wrong if (path := _repair_section(mended, fault))}
        spec, wrong = validate_values(ExperimentSpec, mended)
        if spec is not None:  # nearly everything has to fit the schedule
            wrong = [] if ("rollout",) in left_out else list(_find_spec_errors(spec))
        for fault in wrong:
            told = (fault.path, fault.message)
            # It may be only a consequence of what was left out.
            follows = any(
                _has_path_overlap(fault.path, path)
                or _has_path_overlap(fault.against, path)
                or (path[0] == "rewards" and f"'{path[-1]}'" in fault.message)
                for path in left_out
            )
            if told not in reported and fault.path not in guessed and not follows:
                reported.add(told)
                yield fault
        if spec is not None:
            return


def _repair_section(tree: Any, fault: Diagnostic) -> KeyPath:
    """Replaces or removes the value that a fault is about; returns its path unless the valid key or
    name is known."""
    path = fault.path
    if not path:
        return ()
    if fault.kind == "missing_key" or (path[-1] in _KIND_KEYS and not fault.meant):
        return _leave_out(tree, path[:-1] or path)
    owner = _find_container(tree, path)
    if owner is not None and fault.meant and fault.kind == "value":
        owner[path[-1]] = fault.meant
        return ()
    if owner is not None and fault.meant and fault.meant not in owner:
        owner[fault.meant] = owner.pop(path[-1])
        return ()
    return _leave_out(tree, path)


def _leave_out(tree: Any, path: KeyPath) -> KeyPath:
    """Removes a value, or puts a placeholder there; returns its path."""
    while path and isinstance(path[-1], int):
        path = path[:-1]  # removing one item would shift the indices of the following ones
    if len(path) == 1 and path[0] in _PLACEHOLDERS:
        tree[path[0]] = deepcopy(_PLACEHOLDERS[str(path[0])])
    elif (owner := _find_container(tree, path)) is not None:
        owner.pop(path[-1])
    return path


def _find_container(tree: Any, path: KeyPath) -> Any:
    """Returns the mapping or list that contains `path`, or None."""
    return get_at_path(tree, path[:-1]) if path and has_path(tree, path) else None


def _has_path_overlap(one: KeyPath, other: KeyPath) -> bool:
    """Whether one of two paths is a prefix of the other."""
    return bool(one) and all(mine == theirs for mine, theirs in zip(one, other, strict=False))
