"""Checks before a run that its model can be shown every text, and that held-out texts are.

`rlx validate` checks a few problems, if the task's data are here; `rlx submit` checks many.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

from rlx.discovery import ExperimentPlugins, resolve_plugins
from rlx.errors import RlxError, summarize_error
from rlx.model import (
    build_vocabulary_dialogue,
    choose_vocabulary,
    find_text_faults,
    list_text_sources,
)
from rlx.plan.checks import find_in_phases
from rlx.plugin import Demonstration, ListsProblems, Plugin, Problem, Reward, Split, Task, TurnLevel
from rlx.plugin_calls import show_plugin_output
from rlx.seeding import derive_seed
from rlx.spec import (
    EnvironmentRolloutSpec,
    ExperimentSpec,
    KeyPath,
    MultiTurnRolloutSpec,
    PhaseSpec,
    TinyModelSpec,
)
from rlx.spec.reading import (
    Diagnostic,
    LoadedSpec,
    build_error,
    build_warning,
    did_you_mean,
    locate_diagnostic,
)

_CHECKED_BY_VALIDATE, _CHECKED_BY_SUBMIT = 16, 256
"""Problems of each set that `rlx validate` checks, and of generated ones that `rlx submit` does."""
_OF_ENVIRONMENT = "rollout.environment: "
_TAG = re.compile(r"</([A-Za-z_][A-Za-z0-9_-]*)>")


def check_texts(
    spec: ExperimentSpec, plugins: ExperimentPlugins, *, thorough: bool
) -> Iterator[Diagnostic]:
    """Yields what keeps problems and demonstrations from being shown to the model; nothing of a run
    from a checkpoint, which has the tokenizer of that run.

    Args:
        thorough: check many problems and pretrained models too; every exception is a fault.
            Otherwise a task that fails is skipped: its data may be elsewhere.
    """
    if spec.from_checkpoint is not None:
        return
    try:
        yield from _find_faults(spec, plugins, thorough=thorough)
    except Exception as error:  # noqa: BLE001  (third-party code)
        if isinstance(error, RlxError) and not isinstance(spec.model, TinyModelSpec):
            return  # the check of the model's files reports it
        if thorough or isinstance(error, RlxError):
            yield _build_task_fault(error)


def require_showable_texts(read: LoadedSpec, plugins: ExperimentPlugins) -> None:
    """Raises InvalidSpec for an experiment whose first problems its tiny model cannot be shown."""
    found = check_texts(read.spec, plugins, thorough=False)
    if faults := [fault for fault in found if fault.kind != "machine"]:
        raise read.document.build_refusal(faults)


def find_missing_parts(read: LoadedSpec, plugins: ExperimentPlugins) -> Iterator[Diagnostic]:
    """Yields a warning for each task, of a phase too, whose data are not on this machine, and for
    each tracker whose library is not."""
    spec = read.spec
    seen = [plugins.task]

    def check_phase(phase: PhaseSpec) -> Iterator[Diagnostic]:
        changed = spec.resolve_phase_spec(phase)
        task = resolve_plugins(changed).task
        if task not in seen:
            seen.append(task)
            yield from _check_data(changed, task)

    own = list(_check_data(spec, plugins.task))
    found = [*own, *find_in_phases(spec, own, check_phase)]
    for number, tracker in enumerate(spec.tracking.trackers):
        try:
            tracker.check()
        except ImportError as error:
            path = ("tracking", "trackers", number)
            found.append(build_warning(path, summarize_error(error), "`rlx submit` needs it"))
    yield from (locate_diagnostic(one, read.document) for one in found)


def _check_data(spec: ExperimentSpec, task: Plugin) -> Iterator[Diagnostic]:
    if not isinstance(task, Task):
        return
    try:
        with show_plugin_output(spec.task.plugin):
            task.problem("train", 0, derive_seed(spec.seed, "train"))
    except (OSError, ImportError) as error:
        yield build_warning(
            ("task",),
            f"task: its data are not on this machine: {summarize_error(error)}",
            "`rlx submit` needs them, and they were not checked",
        )
    except Exception:  # noqa: BLE001  (reported elsewhere)
        pass


def _find_faults(
    spec: ExperimentSpec, plugins: ExperimentPlugins, *, thorough: bool
) -> Iterator[Diagnostic]:
    yield from _check_span_names(spec, plugins.task)
    most = _CHECKED_BY_SUBMIT if thorough else _CHECKED_BY_VALIDATE
    bound = None if thorough else most
    yield from _check_right_answers(spec, plugins, most)
    if isinstance(spec.model, TinyModelSpec):
        sources = list_text_sources(spec, plugins)
        # A tokenizer that was chosen by few texts may be another.
        for sample in sorted({most, _CHECKED_BY_SUBMIT}):
            dialogue = build_vocabulary_dialogue(choose_vocabulary(spec, plugins, sample))
            found = list(find_text_faults(sources, dialogue, spec.model.max_position, bound))
            if not found:
                return
        yield from found
    elif thorough or (isinstance(spec.rollout, EnvironmentRolloutSpec) and spec.rollout.tools):
        from rlx.model import find_local_context_length, load_local_dialogue

        pretrained = load_local_dialogue(spec.model)
        if pretrained is not None:
            longest = find_local_context_length(spec.model)
            sources = list_text_sources(spec, plugins)
            yield from find_text_faults(sources, pretrained, longest, bound)


def _check_right_answers(
    spec: ExperimentSpec, plugins: ExperimentPlugins, most: int
) -> Iterator[Diagnostic]:
    """Yields rewards that cannot use one of the problems: of all that tasks can list, held-out ones
    too, else of the first."""
    rewards = [
        (path, reward)
        for path, reward in plugins.rewards.items()
        if isinstance(reward, Reward) and type(reward).check_problem is not Reward.check_problem
    ]
    if not rewards or not isinstance(plugins.task, Task):
        return
    problems: list[tuple[str, Problem]] = []
    with suppress(OSError, ImportError, ValueError), show_plugin_output(spec.task.plugin):
        for task in (plugins.task, *plugins.variants.values()):  # `check` reports what is missing
            problems += _list_problems(cast(Task, task), spec.seed, most)
    for path, reward in rewards:
        checked = ((at, problem, _find_problem_fault(reward, problem)) for at, problem in problems)
        if faults := [one for one in checked if one[-1]]:
            where, problem, why = faults[0]
            text = problem.prompt if len(problem.prompt) < 60 else f"{problem.prompt[:60]}…"
            more = f"; so are {len(faults)} of {len(problems)} problems" if len(faults) > 1 else ""
            yield build_error(
                ("rewards", *path),
                f"the reward cannot use {where}, {text!r}: {why}{more}",
                "correct the record, or leave it out",
                kind="value",
            )


def _list_problems(task: Task, seed: int, most: int) -> Iterator[tuple[str, Problem]]:
    if isinstance(task, ListsProblems):
        yield from task.list_problems()
        return
    splits: tuple[tuple[Split, str], ...] = (("train", "train"), ("test", "held out"))
    for split, name in splits:
        for number in range(most):
            problem = task.problem(split, number, derive_seed(seed, name))
            yield f"problem {problem.id}", problem


def _find_problem_fault(reward: Reward, problem: Problem) -> str:
    try:
        with show_plugin_output(type(reward).__name__):
            reward.check_problem(problem.fields)
    except ValueError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  (the code of others)
        return f"{type(error).__name__}: {error}"
    return ""


def _list_worked_tags(spec: ExperimentSpec, task: Any) -> Iterator[tuple[TurnLevel, list[str]]]:
    """Yields every level of turns with the tags that the task's first demonstrations close there;
    none where an environment answers."""
    if isinstance(spec.rollout, MultiTurnRolloutSpec):
        return
    worked: list[Sequence[str]] = []
    can_work = isinstance(task, Task) and getattr(task, "demonstrates", True)
    with suppress(Exception):  # the experiment may need none; those that it needs are checked below
        for number in range(_CHECKED_BY_VALIDATE if can_work else 0):
            with show_plugin_output(type(task).__name__):
                found = task.demonstration(task.problem("train", number, spec.seed), spec.seed)
            if isinstance(found, Demonstration):
                worked.append(spec.rollout.arrange_demonstration(found.turns))
    for number, level in enumerate(spec.rollout.list_levels()):
        texts = [turns[number] for turns in worked if number < len(turns)]
        yield level, list(dict.fromkeys(name for text in texts for name in _TAG.findall(text)))


def _check_span_names(spec: ExperimentSpec, task: Plugin) -> Iterator[Diagnostic]:
    """Yields spans that no turn of the task's demonstrations has, and that resemble one it has."""
    for level, worked in _list_worked_tags(spec, task):
        spans = level.turn.spans
        tags = {*worked, *(name for text in level.turn.stop for name in _TAG.findall(text))}
        for place, span in enumerate(spans):
            if span not in tags and (near := did_you_mean(span, tags.difference(spans))):
                path = ("rollout", *level.at, "spans", place)
                message = f"{level.key}.spans names {span!r}, a tag that no worked {level.kind} has"
                yield build_error(path, message, f"did you mean '{near}'?", kind="value")


def find_data_cautions(spec: ExperimentSpec, plugins: ExperimentPlugins) -> Iterator[Diagnostic]:
    """Yields warnings about what a policy is shown and measured by, if the data are here."""
    starts, seed = spec.model.warm_start is not None, spec.seed
    worked: list[Problem] = []
    held_out: list[Problem] = []
    with suppress(OSError, ImportError, ValueError), show_plugin_output(spec.task.plugin):
        held_out = _list_first_pass(plugins.task, "test", derive_seed(seed, "held out"))
        if starts:
            lessons = derive_seed(seed, "warm start")
            worked = _list_first_pass(plugins.demonstrations, "train", lessons)
    for level, tags in _list_worked_tags(spec, plugins.demonstrations) if starts else ():
        missing = [span for span in level.turn.spans if span not in tags]
        if missing and set(tags) - set(level.turn.spans):
            yield build_warning(
                ("rollout", *level.at, "spans"),
                f"{level.key}.spans names {', '.join(missing)}, which no worked {level.kind} of "
                f"the warm start has; it has {', '.join(tags)}",
                "name the tags that it has, or change the demonstrations",
            )
    asked, known = spec.evaluation.problems, len({problem.id for problem in held_out})
    if 0 < known < asked:
        yield build_warning(
            ("evaluation", "problems"),
            f"evaluation.problems is {asked}, but there are {known} held-out problems: some are "
            "answered several times",
            f"problems: {known}",
        )
    shown = {problem.prompt.strip() for problem in worked}
    leaked = {problem.id for problem in held_out[:asked] if problem.prompt.strip() in shown}
    if leaked:
        yield build_warning(
            ("model", "warm_start"),
            f"{len(leaked)} of {min(asked, known)} held-out problems are among the demonstrations "
            "of the warm start: accuracy would be measured on what was shown",
            "leave them out of the demonstrations",
        )


def _list_first_pass(task: Plugin, split: Split, seed: int) -> list[Problem]:
    """The problems of a split in order, each once; none of a task that cannot list its problems."""
    if not isinstance(task, ListsProblems) or not isinstance(task, Task):
        return []
    found: dict[str, Problem] = {}
    for number in range(sum(1 for _ in task.list_problems())):  # of both splits: enough for one
        problem = task.problem(split, number, seed)
        found.setdefault(problem.id, problem)
    return list(found.values())


def _build_task_fault(error: Exception) -> Diagnostic:
    why = summarize_error(error)
    if why.startswith(_OF_ENVIRONMENT):
        message = why.removeprefix(_OF_ENVIRONMENT)
        return build_error(("rollout", "environment"), message, kind="plugin")
    if isinstance(error, RlxError):
        path: KeyPath = ("model", "tokenizer") if "tokenizer" in why else ("task",)
        return build_error(path, why.removeprefix("model.tokenizer: "), kind="machine")
    if isinstance(error, ValueError):
        return build_error(("task",), why, kind="value")
    message = f"task: its first problems cannot be made: {type(error).__name__}: {why}"
    return build_error(("task",), message, kind="plugin")
