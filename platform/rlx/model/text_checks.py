"""Checks an experiment's texts against its tokenizer, and chooses a tiny model's tokenizer by them,
without importing transformers for it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

from rlx.discovery import ExperimentPlugins, resolve_plugins
from rlx.errors import EnvironmentFault, SpecError
from rlx.model.dialogue import DemonstrationPlayer, ModelDialogue
from rlx.model.tokenizer import build_vocabulary_dialogue, load_vocabulary
from rlx.model.vocabulary import SPECIAL_TOKENS, Vocabulary
from rlx.plugin import Environment, ListsProblems, Problem, Split, Task
from rlx.plugin_calls import show_plugin_output
from rlx.rollout import (
    PromptFit,
    build_rollout_plan,
    describe_tools,
    fill_turn_template,
    list_schemas,
    measure_prompt,
)
from rlx.seeding import derive_seed
from rlx.spec import (
    CLOSED_VOCABULARIES,
    EnvironmentRolloutSpec,
    ExperimentSpec,
    KeyPath,
    TinyModelSpec,
)
from rlx.spec.reading import Diagnostic, build_error

SAMPLE = 256
"""Problems, and demonstrations, of each task whose texts choose and train a tokenizer."""
CHECKED_DEMONSTRATIONS = 32
"""Demonstrations that are checked before a run."""
GENERATED_PROBLEMS = 10_000
"""Problems that are checked before a run of tasks that make them up: some seconds of work."""

_CONTROL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS.values())))


@dataclass(frozen=True, slots=True)
class TextSource:
    """What one phase of an experiment shows a model.

    Attributes:
        demonstrations: source of the warm start's demonstrations.
        held_out: tasks of the held-out sets, by the key path that names them.
    """

    spec: ExperimentSpec
    task: Task
    demonstrations: Task
    held_out: Mapping[KeyPath, Task] = field(default_factory=dict)
    environment: Environment | None = None


def list_text_sources(spec: ExperimentSpec, plugins: ExperimentPlugins) -> list[TextSource]:
    """Returns what the experiment itself and each of its phases shows the model."""
    held_out: dict[KeyPath, Task] = {("task",): cast(Task, plugins.task)}
    for name, task in plugins.variants.items():
        held_out["evaluation", "variants", name] = task
    task, worked = cast(Task, plugins.task), cast(Task, plugins.demonstrations)
    sources = [TextSource(spec, task, worked, held_out, plugins.environment)]
    for phase in spec.phases:
        if phase.set:
            own = spec.resolve_phase_spec(phase)
            made = resolve_plugins(own)
            sources.append(TextSource(own, cast(Task, made.task), worked, {}, made.environment))
    return sources


# Choosing a tokenizer ----------------------------------------------------------------------------


_CHOSEN: dict[tuple[str, int, bool], Vocabulary] = {}
"""Earlier choices: a submission asks three times, each member of a group again."""


def choose_vocabulary(
    spec: ExperimentSpec, plugins: ExperimentPlugins, sample: int = SAMPLE
) -> Vocabulary:
    """Returns the tokenizer of a tiny model, trained on the experiment's texts if necessary.

    The texts do not depend on the seed. Of each task `sample` problems and demonstrations are read;
    a run's tokenizer is that of the default.

    Raises:
        EnvironmentFault: the tokenizer's folder is missing or damaged.
    """
    model = cast(TinyModelSpec, spec.model)
    if model.tokenizer not in (None, "train"):
        return load_vocabulary(model)
    may_be_closed = model.tokenizer is None
    key = f"{plugins.compute_digest(spec)} {plugins.list_records()}", sample, may_be_closed
    if key not in _CHOSEN:
        # A warm start's demonstrations are those of the first.
        first, *others = list_text_sources(spec, plugins)
        found = chain(
            _list_prompts(first, sample),
            _list_demonstrations(first, sample),
            *(_list_prompts(source, sample) for source in others),
        )
        texts = list(dict.fromkeys(found))
        shipped = map(Vocabulary.load_shipped, CLOSED_VOCABULARIES if may_be_closed else ())
        fitting = (v for v in shipped if all(v.unk_token_id not in v.encode(t) for t in texts))
        _CHOSEN[key] = next(fitting, None) or Vocabulary.train(texts)
    return _CHOSEN[key]


def _list_prompts(source: TextSource, sample: int) -> Iterator[str]:
    """Yields what a model reads in one phase."""
    spec = source.spec
    dialogue = build_vocabulary_dialogue(Vocabulary.build_bytes())
    yield spec.rollout.system
    if isinstance(spec.rollout, EnvironmentRolloutSpec) and spec.rollout.tools:
        yield describe_tools(list_schemas(spec.rollout.tools))
    yield from (message.content for one in spec.rollout.examples for message in one.messages)
    yield from (turn.prefix for turn in spec.rollout.turn_specs.values())
    drawn: list[tuple[Task, Split, int]] = [
        (source.task, "train", spec.rollout.prompts_per_step * spec.steps),
        *((task, "test", spec.evaluation.problems) for task in source.held_out.values()),
    ]
    for task, split, count in drawn:
        data = derive_seed(0, "tokenizer", split)
        for number in range(min(sample, count)):
            with show_plugin_output(spec.task.plugin):
                problem = task.problem(split, number, data)
            yield problem.system
            yield from (message.content for message in problem.history)
            for turn in spec.rollout.turn_specs.values():
                yield fill_turn_template(dialogue, turn.template, problem)


def _list_demonstrations(source: TextSource, sample: int) -> Iterator[str]:
    """Yields what a model reads and writes in a warm start's demonstrations, if it has any."""
    if source.spec.model.warm_start is None:
        return
    spec = source.spec.model_copy(update={"seed": 0})
    dialogue = build_vocabulary_dialogue(Vocabulary.build_bytes())
    player = DemonstrationPlayer(spec, source.demonstrations, source.environment)
    for number in range(sample):
        for ids in player.list_parts(dialogue, number):
            yield from _CONTROL.split(dialogue.decode_tokens(ids))


# Checks ------------------------------------------------------------------------------------------


def find_text_faults(
    sources: Sequence[TextSource], dialogue: ModelDialogue, context_length: int, most: int | None
) -> Iterator[Diagnostic]:
    """Yields what keeps an experiment's problems and demonstrations from being shown to its model.

    Args:
        sources: the phases; the held-out sets are those of the first.
        context_length: of the model, in tokens.
        most: how many problems of each set are checked; None checks all that a run draws, of tasks
            that make them up at most `GENERATED_PROBLEMS`.
    """
    faults: list[Diagnostic] = []
    for number, source in enumerate(sources):
        spec = source.spec
        plan, rule = build_rollout_plan(spec.rollout), spec.rollout.max_prompt_tokens
        if plan.talk is not None and plan.talk.tools:
            try:
                dialogue.check_tools(plan.talk.tools)
            except SpecError as error:
                what, _, instead = str(error).partition("; ")
                faults.append(build_error(("rollout", "tools"), what, instead, kind="value"))
                continue
        fit = PromptFit(plan, dialogue, context_length, rule)
        drawn = spec.rollout.prompts_per_step * spec.steps
        problems = _draw_problems(source.task, "train", spec, drawn, most)
        faults += _check_problems(fit, problems, ("task",), spec)
        for path, task in source.held_out.items() if number == 0 else ():
            problems = _draw_problems(task, "test", spec, spec.evaluation.problems, most)
            faults += _check_problems(fit, problems, path, spec)
        if spec.model.warm_start is not None and number == 0:
            player = DemonstrationPlayer(spec, source.demonstrations, source.environment)
            checked = min(CHECKED_DEMONSTRATIONS, most or CHECKED_DEMONSTRATIONS)
            try:
                for index in range(checked):
                    player.episode(dialogue, index)
            except SpecError as error:
                path = "model", "warm_start"
                faults.append(_build_vocabulary_fault(spec, path, str(error)))
    causes: dict[tuple[KeyPath, tuple[str, ...]], Diagnostic] = {}
    for fault in faults:
        causes.setdefault((fault.path, fault.helps), fault)
    yield from causes.values()


def _draw_problems(
    task: Task, split: Split, spec: ExperimentSpec, drawn: int, most: int | None
) -> Iterator[Problem]:
    """Yields at most `most` of the `drawn` problems of a run, a listed one once."""
    data = derive_seed(spec.seed, "train" if split == "train" else "held out")
    seen: set[str] = set()
    listed = isinstance(task, ListsProblems)
    most = drawn if most is None and listed else most or GENERATED_PROBLEMS
    for number in range(min(most, drawn)):
        with show_plugin_output(spec.task.plugin):
            problem = task.problem(split, number, data)
        if listed and problem.id in seen:
            continue  # of a later pass
        seen.add(problem.id)
        yield problem


def _check_problems(
    fit: PromptFit, problems: Iterator[Problem], path: KeyPath, spec: ExperimentSpec
) -> Iterator[Diagnostic]:
    """Checks that problems can be written and fit, as `rollout.max_prompt_tokens` has it."""
    any_text = True
    try:  # a tokenizer of bytes, for one, has tokens for all characters
        fit.dialogue.encode("ʬ\N{MATHEMATICAL BOLD CAPITAL A}\N{GRINNING FACE}")
    except SpecError:
        any_text = False
    count, too_long = 0, list[str]()  # of tasks that repeat problems, too
    try:
        frame = measure_prompt(fit.plan, Problem(id="", prompt="", fields={}), fit.dialogue)
        for problem in problems:
            count += 1
            is_short = any_text and fit.is_short(problem, frame)
            if not is_short and (excess := fit.describe_excess(problem)):
                too_long.append(excess)
            elif any_text and fit.rule is not None:
                return  # one that fits is enough
    except SpecError as error:
        yield _build_vocabulary_fault(spec, path, str(error))
        return
    if not too_long or (fit.rule is not None and len(too_long) < count):
        return
    room = "model.max_position" if isinstance(spec.model, TinyModelSpec) else "the context"
    many = f"{len(too_long)} of the first {count} problems do not fit: {too_long[0]}"
    yield build_error(
        path,
        many,
        "leave them out by `rollout.max_prompt_tokens: {}`, lower max_new_tokens, or raise "
        f"{room}"
        if fit.rule is None
        else f"raise rollout.max_prompt_tokens.limit or {room}",
        kind="value",
    )


def _build_vocabulary_fault(spec: ExperimentSpec, path: KeyPath, message: str) -> Diagnostic:
    if not isinstance(spec.model, TinyModelSpec):
        help_ = "choose task options whose text it can encode"
        return build_error(path, message, help_, kind="value")
    return build_error(
        ("model", "tokenizer"),
        message.partition(": choose task options")[0],
        "leave model.tokenizer out, so that it follows the task; `train` and `bytes` write any "
        "text",
        kind="value",
    )


def choose_run_vocabulary(spec: ExperimentSpec, plugins: ExperimentPlugins) -> Vocabulary | None:
    """Chooses the tokenizer to store with a run of a tiny model; None if every rank knows it from
    the spec.

    Raises:
        EnvironmentFault: the tokenizer's folder is damaged, or its training texts are not on this
            machine.
    """
    if not isinstance(spec.model, TinyModelSpec) or spec.from_checkpoint is not None:
        return None
    try:
        chosen = choose_vocabulary(spec, plugins)
    except (OSError, ImportError) as error:
        if spec.model.tokenizer is None:
            return None  # as if it had been left out before there was a choice
        raise EnvironmentFault(
            f"model.tokenizer: it is trained on the task's texts, which are not here ({error}); "
            "submit where they are, or use `bytes`"
        ) from error
    default = Vocabulary.load_shipped(CLOSED_VOCABULARIES[0])
    implied = spec.model.tokenizer in ("bytes", *CLOSED_VOCABULARIES) or (
        spec.model.tokenizer is None and chosen.digest == default.digest
    )
    return None if implied else chosen
