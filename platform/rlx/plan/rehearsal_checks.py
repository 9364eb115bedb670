"""The rehearsal of an experiment: a trial of every phase, and what is wrong with it."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

import psutil
import torch

from rlx.batch import NO_TURN
from rlx.credit import CreditInputs
from rlx.discovery import ExperimentPlugins
from rlx.errors import EnvironmentFault, PluginError, RlxError, summarize_error
from rlx.launch import format_disk_space, open_launcher
from rlx.phase_setup import build_setup
from rlx.plan.row_accounts import describe_row_kind
from rlx.plan.texts import find_data_cautions
from rlx.plan.trial import PlanSpeech, PlanTrial, load_plan_problems, load_speech, run_trial
from rlx.plugin import TurnLevel
from rlx.reward import NamedReward, RewardPool
from rlx.rollout import EnvironmentPlan, Segment
from rlx.spec import (
    EVERY_TURN,
    AgentRolloutSpec,
    EnvironmentRolloutSpec,
    ExperimentSpec,
    FaultKind,
    KeyPath,
    PhaseSpec,
    TinyModelSpec,
    TurnReward,
)
from rlx.spec.reading import (
    Diagnostic,
    InvalidSpec,
    LoadedSpec,
    build_error,
    build_refusal,
    build_warning,
    format_key_path,
    locate_diagnostic,
    relocate_phase_fault,
)
from rlx.step import TrainBatch
from rlx.text import escape_unprintable, pluralize_noun

_TRAILING_TAG = re.compile(r"<([A-Za-z_][\w-]*)>\s*$")
_QUOTED, _TOLD = 160, 300
"""Maximum characters of a response that a message quotes, and of a plugin's own message."""


def check_trial(trial: PlanTrial) -> Iterator[Diagnostic]:
    """Yields errors and warnings about one phase."""
    plan = trial.setup.plan
    for level in plan.levels:
        yield from _check_turn(trial, level)
    if plan.talk is not None:
        yield from _check_trial_environment(trial, plan.talk)
    for reward in trial.setup.rewards:
        yield from _check_trial_reward(trial, reward)
    if trial.train is None or trial.rewards is None:
        if not trial.is_faulty and trial.rewards is None:
            yield build_error(("rewards",), f"nothing can be learned: {trial.stopped}")
        elif not trial.is_faulty:
            yield build_error(("credit", "on_missing_turn"), trial.stopped)
        return
    yield from _check_trial_mask(trial, trial.train, trial.rewards)
    yield from _check_judge_values(trial)
    # After a fault, the other findings mean little.
    if not trial.is_faulty and not trial.setup.spec.learns_from_teacher:
        yield from _check_group_signal(trial.train)
    yield from _check_memory(trial)


def _check_memory(trial: PlanTrial) -> Iterator[Diagnostic]:
    """Warns where ranks on this machine's CPU need more memory than it has free: the system ends
    them without a word. What fits a GPU is in the report of `rlx plan`."""
    runner, memory = trial.setup.spec.runner, trial.memory
    on_gpu = runner.device == "cuda" or (runner.device == "auto" and torch.cuda.is_available())
    if memory is None or on_gpu:
        return
    free = psutil.virtual_memory().available
    ranks = open_launcher(runner, trial.setup.spec.sampler).count_ranks_here()
    if ranks * memory.total > free:
        stage, each = memory.largest_stage, f" on each of {ranks} ranks" if ranks > 1 else ""
        yield build_warning(
            ("runner", "micro_batch_tokens") if stage == "update" else (),
            f"the stage '{stage}' of a step needs up to {format_disk_space(memory.total)} of "
            f"memory{each}, but this machine has {format_disk_space(free)} free",
            f"lower runner.micro_batch_tokens, now {runner.micro_batch_tokens}"
            if stage == "update"
            else "end other programs, or take a smaller model",
        )


# Rewards -----------------------------------------------------------------------------------------
def _check_trial_reward(trial: PlanTrial, reward: NamedReward) -> Iterator[Diagnostic]:
    path: KeyPath = ("rewards", reward.scope, reward.name)
    name, plugin, use = format_key_path(path), reward.use.plugin, reward.use
    table = trial.table.rollouts if reward.scope == "global" else trial.table.turns
    entries = {place: own[reward.name] for place, own in table.items() if reward.name in own}
    for (tree, segment), entry in entries.items():
        if entry.is_fault:
            fault = _build_plugin_fault(
                trial,
                path,
                f"reward plugin {plugin!r} ({name})",
                entry.reason or "it returned nothing",
                ("", trial.trees[tree].segments[segment].text),
                handled="continue without the score",
                lenient=use.on_error != "fail",
            )
            yield replace(fault, helps=(f"rlx plugins check {plugin}",))
            return
    if trial.is_faulty or reward.name.startswith("_"):
        return
    kind = use.turn if isinstance(use, TurnReward) else "rollout"
    where = "turn" if kind == EVERY_TURN else kind
    scored = [entry for entry in entries.values() if entry.raw is not None]
    if not scored:
        yield build_warning(
            path,
            f"{name} has a weight of {use.weight:g} on a reward that no synthetic {where} produces",
            f"check that {plugin!r} fits the task's records and this turn, or drop it",
        )
        return
    # Placeholders may lack what a reward reads, and an environment may not understand other turns.
    acts = trial.setup.plan.talk is None or trial.is_scripted
    if trial.note or not acts or any(entry.raw for entry in scored):
        return
    reasons = Counter(entry.reason or "" for entry in scored)
    given = (why for why, _ in reasons.most_common() if why != f"{use.requires} failed")
    if "" not in reasons and (reason := next(given, "")):
        yield build_warning(
            path,
            f"{name} is 0 for every synthetic {where}: {escape_unprintable(reason[:_TOLD])}",
            f"check that {plugin!r} scores this kind of turn, and that the turn can "
            "contain what it reads",
        )


def _check_judge_values(trial: PlanTrial) -> Iterator[Diagnostic]:
    """Reports a judge of answers whose right ones are paid something else than 1."""
    name, table = trial.setup.spec.evaluation.correct, trial.table
    entries = chain(table.turns.values(), table.rollouts.values())
    values = {own[name].raw or 0.0 for own in entries if name in own}
    if not trial.note and 1.0 not in values and max(values, default=0.0) > 1:
        yield build_warning(
            ("evaluation", "correct"),
            f"evaluation counts answers as right whose {name!r} is 1, and for synthetic ones it is "
            f"{', '.join(f'{value:g}' for value in sorted(values)[:3])}: accuracy would be 0",
            "let it return 1 for a right answer, and set its `weight`",
        )


# Credit ------------------------------------------------------------------------------------------
def _check_trial_mask(
    trial: PlanTrial, train: TrainBatch, rewards: CreditInputs
) -> Iterator[Diagnostic]:
    who = f"mask strategy {trial.setup.spec.mask.plugin!r} selects"
    if not train.mask.any():
        yield build_error(
            ("mask",),
            f"{who} no token of any synthetic response",
            "check the spans that the turns declare, and the strategy's `fallback`",
        )
        return
    learning: dict[str, bool] = {}
    for b, row in enumerate(train.batch.rows):
        for turn in (trial.trees[row.tree].segments[place] for place in row.turns):
            own = train.mask[b] & (train.batch.turn_ids[b] == turn.turn)
            learning[turn.kind] = learning.get(turn.kind, False) or bool(own.any())
    for kind in (kind for kind, learns in learning.items() if not learns):
        yield build_warning(("mask",), f"{who} no token of a synthetic {kind}")
    lost = float(train.lost.abs().sum())
    total = float(rewards.turn_rewards.abs().sum() + rewards.global_rewards.abs().sum())
    if lost and total:
        yield build_warning(
            ("credit", "on_missing_turn"),
            f"{lost / total:.0%} of the reward is placed on no token: the mask selects no token "
            "of the turns that earned it",
            "use `on_missing_turn: to_last_token` to keep it, or widen the mask",
        )
    foreign = train.mask & (train.batch.turn_ids == NO_TURN)
    if foreign.any() and trial.setup.spec.loss.old_logprobs == "behaviour":
        yield build_error(
            ("mask",),
            f"{who} tokens that the policy did not write: their behaviour log-probabilities are "
            "unknown",
            "loss.old_logprobs: learner",
        )


def _check_group_signal(train: TrainBatch) -> Iterator[Diagnostic]:
    if not train.mask.any():
        return
    for level in range(int(train.batch.levels.max()) + 1):
        rows = train.batch.levels == level
        if not rows.any():
            continue
        kind = describe_row_kind([row for row in train.batch.rows if row.level == level])
        # Groups of one are reported when the spec is read.
        alone = len(train.batch.group_ids[rows].unique()) == int(rows.sum())
        if alone or not train.mask[rows].any() or (train.advantages[rows] != 0).any():
            continue
        scores = train.scores.total_score[rows]
        alike = bool((scores == scores[0]).all())
        why = f"every {kind} scored {float(scores[0]):g}" if alike else "all groups are tied"
        yield build_warning(
            ("rewards",),
            f"no group of synthetic {pluralize_noun(kind)} has a signal: {why}, so every advantage "
            "is 0",
            "check the rewards below: do they distinguish good responses from poor ones?",
        )


# Turns -------------------------------------------------------------------------------------------
def _check_turn(trial: PlanTrial, level: TurnLevel) -> Iterator[Diagnostic]:
    path: KeyPath = ("rollout", level.kind)
    talk = trial.setup.plan.talk
    turns = [
        segment
        for tree in trial.trees
        for segment in tree.segments
        if (
            segment.kind == level.kind
            if talk is None
            else segment.author == "policy" and talk.sampling(segment.turn) == level.turn
        )
    ]
    yield from _check_template_end((*path, "template"), level.turn.template)
    cut = list(_check_token_limit(trial, path, level.turn.max_new_tokens, turns))
    yield from cut
    if not cut and level.turn.spans and turns and not any(s.spans for s in turns):
        yield build_warning(
            (*path, "spans"),
            f"no synthetic {level.kind} has any of the spans {', '.join(level.turn.spans)}",
            "use the tags of the task's demonstrations, or have the prompt ask for these",
        )


def _check_template_end(path: KeyPath, template: str) -> Iterator[Diagnostic]:
    """Reports a tag, declared as a span or not, that ends the template: rewards look for it in what
    is generated. `<think>` may open the reasoning."""
    last = _TRAILING_TAG.search(template)
    if last and last[1] != "think":
        tag = f"<{last[1]}>"
        yield build_error(
            path,
            f"{format_key_path(path)} ends with {tag} and never closes it: the generated text then "
            f"has no {tag} of its own, so its span {last[1]!r} is not found",
            f"let the model write {tag} itself, or close it in the template",
        )


def _check_token_limit(
    trial: PlanTrial, path: KeyPath, budget: int, turns: Sequence[Segment]
) -> Iterator[Diagnostic]:
    """Reports turns that often exceed their budget: over half, or over a tenth if scripted."""
    cut = sum(s.finish_reason == "length" for s in turns)
    if trial.is_scripted:
        cut = sum(s.finish_reason == "length" and len(s.token_ids) == budget for s in turns)
    if cut > len(turns) * (0.1 if trial.is_scripted else 0.5):
        at = (*path, "max_new_tokens")
        yield build_warning(
            at,
            f"{format_key_path(at)} is {budget}, and {cut} of {len(turns)} synthetic "
            f"{path[-1]}s need more",
            "give the turn room for all of its spans and the token that ends it",
        )


# Environments ----------------------------------------------------------------------------------
def _check_trial_environment(trial: PlanTrial, talk: EnvironmentPlan) -> Iterator[Diagnostic]:
    forced = talk.forced_answer
    if forced is not None:
        path: KeyPath = ("rollout", "forced_answer")
        yield from _check_template_end((*path, "template"), forced.template)
    if trial.faults:
        yield _build_environment_fault(trial)
        return
    if forced is not None and forced.max_new_tokens is not None:
        last = [s for tree in trial.trees for s in tree.segments if s.turn == talk.last]
        yield from _check_token_limit(trial, path, forced.max_new_tokens, last)
    rollouts = sum(len(tree.rollouts) for tree in trial.trees)
    ends = [trial.trees[tree].segments[at].turn for tree, at in trial.unfinished_turns]
    ended = sum(turn < talk.last for turn in ends)
    yield from _check_rollout_length(trial, rollouts, ended)
    undone = len(ends) - ended
    if trial.is_scripted and 2 * undone > rollouts:
        after = "the forced answer" if talk.forced_answer else f"{talk.max_turns} turns"
        yield build_warning(
            ("rollout", "max_turns"),
            f"{undone} of {rollouts} synthetic rollouts are not done after {after}",
            "raise it" if talk.forced_answer else "raise it, or add a `forced_answer`",
        )


def _build_environment_fault(trial: PlanTrial) -> Diagnostic:
    use, talk = trial.setup.spec.rollout, trial.setup.plan.talk
    who, key = "the agent", "schedule"
    if isinstance(use, EnvironmentRolloutSpec):
        who, key = f"environment plugin {use.environment.plugin!r}", "environment"
    elif isinstance(use, AgentRolloutSpec):
        key = "function" if use.command is None else "command"
    (place, at), why = next(iter(trial.faults.items()))
    tree, segment = trial.trees[place], trial.trees[place].segments[at]
    is_start = segment.author == "prompt"
    begins = f"the start of problem {tree.problem.id}: " if is_start else f"turn {segment.turn}: "
    return _build_plugin_fault(
        trial,
        ("rollout", key),
        who,
        why,
        (begins, segment.text),
        handled="continue without the rollout",
        lenient=talk is not None and talk.on_error != "fail",
    )


def _check_rollout_length(trial: PlanTrial, rollouts: int, ended: int) -> Iterator[Diagnostic]:
    """Reports rollouts that may exceed the model's context length; `ended` of them do."""
    room = trial.shape and trial.shape.positions
    tokens = trial.tokens
    if not room or (tokens.longest <= room and not ended):
        return
    first, *later = tokens.levels
    may_take = (
        f"rollouts may take {tokens.longest:.0f} (prompt {first.opening:.0f}, turns "
        f"{sum(level.at_most for level in tokens.levels)}, synthetic observations "
        f"{sum(level.opening for level in later):.0f})"
    )
    found = f"; {ended} of {rollouts} synthetic ones do" if ended else ""
    tiny = isinstance(trial.setup.spec.model, TinyModelSpec)
    yield build_warning(
        ("model", "max_position") if tiny else ("rollout", "max_turns"),
        f"the model holds {room} tokens, and {may_take}: longer ones end early{found}",
        "shorten observations, allow fewer turns or smaller `max_new_tokens`",
        against=("rollout", "max_turns"),
    )


# Plugins that fail --------------------------------------------------------------------------------
def _build_plugin_fault(
    trial: PlanTrial,
    path: KeyPath,
    who: str,
    why: str,
    given: tuple[str, str],
    *,
    handled: str,
    lenient: bool,
) -> Diagnostic:
    """A plugin that failed on a synthetic rollout: only a warning where the problems are
    placeholders, since it proves nothing there.

    Args:
        given: what it was given, in words and as untrusted text.
        handled: what `on_error` would let a run do; `lenient` if it already does.
    """
    what, text = given
    on = "a placeholder problem" if trial.note else "a synthetic response"
    ends = f"a run would fail here; `on_error` would let it {handled}"
    return build_error(
        path,
        f"{who} failed on {on}: {escape_unprintable(why.splitlines()[0][:_TOLD])}",
        kind="plugin",
        notes=(
            f"its input: {what}{text[:_QUOTED]!r}{'…' if len(text) > _QUOTED else ''}",
            "a run would continue, as `on_error` is set" if lenient else ends,
        ),
        severity="warning" if lenient or trial.note else "error",
    )


# All phases --------------------------------------------------------------------------------------
_SECTION = re.compile(
    r"(?:the )?(task|mask|estimator) (?:plugin '|returned )|([a-z_]+(?:\.\w+)*): "
)
"""The beginning of a message that names a section of the experiment."""
_HELP = "`rlx plan` shows what was rehearsed; `rlx submit --no-rehearsal` skips it"


@dataclass(frozen=True, eq=False, slots=True)
class ExperimentTrial:
    """The trials of all phases, equal ones together, up to a plugin that hangs, and what they show:
    errors and warnings, each once, with their locations in the file."""

    speech: PlanSpeech
    trials: tuple[PlanTrial, ...]
    findings: tuple[Diagnostic, ...]


def run_rehearsal_checks(
    experiments: Sequence[tuple[LoadedSpec, ExperimentPlugins]], *, elsewhere: bool = False
) -> list[tuple[Diagnostic, ...]]:
    """Rehearses experiments before runs of them are recorded, and returns the warnings of each;
    those that differ only in what a trial does not depend on, such as the seed, share one. Raises
    InvalidSpec with what keeps the first faulty one from learning anything.

    Args:
        elsewhere: another machine may run them, so what this one lacks is only a warning.
    """
    rehearsed: dict[tuple[str, ...], tuple[Diagnostic, ...]] = {}
    grouped = [tuple(_group_equal_phases(read.spec)) for read, _ in experiments]
    for settings, (read, plugins) in zip(grouped, experiments, strict=True):
        if settings in rehearsed:
            continue
        try:
            found = rehearse_experiment(read, plugins).findings
        except InvalidSpec as error:
            found = error.diagnostics
        if elsewhere:
            found = tuple(
                replace(f, severity="warning") if f.kind == "machine" else f for f in found
            )
        if errors := [f for f in found if f.severity == "error"]:
            errors[-1] = replace(errors[-1], helps=(*errors[-1].helps, _HELP))
            raise build_refusal(errors, read.document.file)
        rehearsed[settings] = found
    return [rehearsed[settings] for settings in grouped]


def rehearse_experiment(read: LoadedSpec, plugins: ExperimentPlugins) -> ExperimentTrial:
    """Runs a trial of every phase with different settings, and checks each; raises InvalidSpec if
    none is possible: the tokenizer cannot write a text, a plugin raises, no worker starts."""
    spec = read.spec
    found: list[tuple[PhaseSpec, Diagnostic]] = []
    trials: list[PlanTrial] = []
    phases = [spec.phases[0]]
    try:
        speech = load_speech(spec, plugins)
        with RewardPool(workers=1, memory_mb=spec.runner.reward_memory_mb) as pool:
            for phases in _group_equal_phases(spec).values():
                setup = build_setup(spec.resolve_phase_spec(phases[0]))
                count = min(_PROMPTS, setup.spec.rollout.prompts_per_step)
                problems = load_plan_problems(setup.spec, setup.task, count)
                trial = replace(run_trial(setup, problems, speech, pool), phases=tuple(phases))
                trials.append(trial)
                found += product(phases, check_trial(trial))
                if trial.stuck_plugin:
                    break  # it would hang in the other phases too, one deadline each
        found += product(spec.phases, find_data_cautions(spec, plugins))
    except RlxError as error:
        found += product(phases, [build_stop_fault(error)])
        raise build_refusal(list(_locate_findings(read, found)), read.document.file) from error
    return ExperimentTrial(speech, tuple(trials), tuple(_locate_findings(read, found)))


def build_stop_fault(error: RlxError) -> Diagnostic:
    """Returns the fault that ends a rehearsal, at the section that its message names."""
    message = summarize_error(error)
    named = _SECTION.match(message)
    path: KeyPath = tuple((named[1] or named[2]).split(".")) if named else ()
    kind: FaultKind = "value"
    if isinstance(error, PluginError | EnvironmentFault):
        kind = "plugin" if isinstance(error, PluginError) else "machine"
    is_section = bool(path) and path[0] in ExperimentSpec.model_fields
    return build_error(path if is_section else (), message, kind=kind)


def _locate_findings(
    read: LoadedSpec, found: Sequence[tuple[PhaseSpec, Diagnostic]]
) -> Iterator[Diagnostic]:
    """Deduplicates findings and locates them in the file: at the phase if it sets the value."""
    phases: dict[tuple[KeyPath, str], list[PhaseSpec]] = {}
    findings: dict[tuple[KeyPath, str], Diagnostic] = {}
    for phase, finding in found:
        place = (finding.path, finding.message)
        phases.setdefault(place, []).append(phase)
        findings[place] = finding
    for place, finding in findings.items():
        those = phases[place]
        if all(phase.set for phase in those) and len(those) < len(read.spec.phases):
            finding = relocate_phase_fault(finding, read.spec.phases.index(those[0]), those[0])
        yield locate_diagnostic(finding, read.document)


_PROMPTS = 3
"""Problems of a trial, or all of a step if it has fewer."""
_UNUSED = {"name", "seed", "phases", "optimizer", "runner", "tracking"}
"""Sections that do not change what a trial finds."""


def _group_equal_phases(spec: ExperimentSpec) -> dict[str, list[PhaseSpec]]:
    """Groups phases that share everything from rollouts to loss, by what a trial depends on."""
    groups: dict[str, list[PhaseSpec]] = {}
    for phase in spec.phases:
        settings = spec.resolve_phase_spec(phase).model_dump_json(exclude=_UNUSED)
        groups.setdefault(settings, []).append(phase)
    return groups
