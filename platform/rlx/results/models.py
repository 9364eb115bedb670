"""Finds and loads the model that is evaluated, probed, served, or tried before a submission."""

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json

from rlx.agents import build_rollout_host
from rlx.checkpoint import copy_checkpoint, read_state, write_weights
from rlx.errors import EnvironmentFault, SpecError
from rlx.evaluation import FirstContact, describe_first_contact
from rlx.home import format_path
from rlx.launch import RUN_LIKE, locate_run_folder, open_registry
from rlx.model import Policy, build_policy, check_model_files
from rlx.phase_setup import PhaseSetup, build_setup
from rlx.plan import check_read_spec, count_reference_parameters, validate_document
from rlx.plugin import StrictModel, expand_path
from rlx.results.targets import check_sections
from rlx.reward import RewardPool, RewardTable, score_rollouts
from rlx.rollout import RolloutTree, sample_rollout_trees
from rlx.run import draw_contact_problems
from rlx.sampler import SamplingEngine, open_sampler, require_engine
from rlx.sealed_folder import CheckpointError, compute_manifest_digest
from rlx.serving import ServedModel
from rlx.spec import (
    CriticSpec,
    ExperimentSpec,
    OptimizerSpec,
    PretrainedModelSpec,
    RunnerSpec,
    SamplerSpec,
)
from rlx.spec.reading import (
    YamlDocument,
    apply_overrides,
    label_refusal,
    parse_yaml_document,
    read_document,
    validate_document_values,
)
from rlx.step import build_scored_rows, find_lost_rows
from rlx.text import escape_unprintable, explain_write_errors, format_duration
from rlx_registry import RunRecord


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model and its experiment.

    Attributes:
        name: name in messages and titles.
        document: the experiment, not yet validated.
        model: folder of the model, or its name on the hub.
        run: the run that trained the model; None if a MODEL was named.
        step: step of the run's checkpoint; None for the exported model.
        mark: digest of a checkpoint's weights, whose files are rewritten each time.
    """

    name: str
    document: YamlDocument
    model: str
    run: RunRecord | None
    step: int | None = None
    mark: str | None = None

    @label_refusal("evaluated")
    def read_spec(self, overrides: Sequence[str]) -> ExperimentSpec:
        """The experiment with overrides, checked with its plugins."""
        document = apply_overrides(self.document, overrides)
        read = validate_document(document)
        check_read_spec(read)
        return read.spec


@contextmanager
def open_target(
    name: str, experiment: Path | None, url: str, step: int | str | None = None
) -> Iterator[TrainedModel]:
    """Yields a model with its experiment; the files of a checkpoint exist until the block ends.

    Args:
        name: a run; or with `experiment`, a model's folder or its name on the hub.
        step: step of one of the run's checkpoints, or `latest`; None for the exported model.
    """
    if experiment is not None:
        local = expand_path(name)
        if not local.is_dir() and RUN_LIKE.fullmatch(name):
            raise SpecError(
                f"there is no folder {escape_unprintable(name)}; with --spec, give a model's "
                "folder or its name on the hub (a run has its own experiment)"
            )
        document, found = read_document(experiment), str(local) if local.is_dir() else name
        try:
            check_model_files(PretrainedModelSpec(path=found))
        except (EnvironmentFault, SpecError) as error:
            raise type(error)(str(error).removeprefix("model.path: ")) from error
        yield TrainedModel(name, document, found, None)
        return
    wrong = "is a folder" if Path(name).is_dir() else "is not a run" if "/" in name else ""
    if wrong:
        whose = "its model" if wrong == "is a folder" else "a model"
        raise SpecError(
            f"{escape_unprintable(name)} {wrong}; name the experiment of {whose} with --spec FILE"
        )
    with open_registry(url) as registry:
        run = registry.run(name)
        recorded = {c.step: c.sha256 for c in registry.results.checkpoints(run.id)}
    folder, spec = locate_run_folder(run), ExperimentSpec.from_record(run.spec)
    text = json.dumps(spec.dump_resolved(), indent=2)
    document = parse_yaml_document(text, f"the experiment of {run.id}")
    if step is None:
        if not (folder.model / "config.json").is_file():
            if run.status == "finished":
                gone = format_path(folder.model)
                raise EnvironmentFault(f"{run.id} no longer has a model: {gone} is gone")
            raise SpecError(
                f"{run.id} has not exported a model: it is {run.effective_status}, and a run "
                "exports its model when it finishes"
            )
        yield TrainedModel(run.id, document, str(folder.model), run)
        return
    with explain_write_errors(folder.root):
        place = tempfile.TemporaryDirectory(dir=folder.root, prefix=".rlx-eval-")
    with place as aside:
        model = Path(aside) / "model"
        try:
            source = copy_checkpoint(folder.checkpoints, str(step), recorded, Path(aside))
            write_weights(spec, source, model, folder.tokenizer)
            at = read_state(source).step
        except CheckpointError as error:
            raise SpecError(f"{run.id} at step {step}: {error}") from error
        mark = compute_manifest_digest(source)
        yield TrainedModel(f"{run.id}@{at}", document, str(model), run, at, mark)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that answers in this process, the workers that score it, and its files."""

    policy: Policy
    sampler: SamplingEngine
    pool: RewardPool
    source: PretrainedModelSpec
    device: torch.device


@contextmanager
def load_model(spec: ExperimentSpec, model: str | None = None) -> Iterator[LoadedModel]:
    """Loads a model into this process, without a learner or ranks.

    Args:
        spec: provides runner and sampler; of its model section only the chat template is used.
        model: folder in the Hugging Face layout, or name on the hub; None loads the pretrained
            model of `spec`, without a warm start.
    """
    runner, own = spec.runner, spec.model
    if model is not None:
        chat = isinstance(own, PretrainedModelSpec) and own.chat_template
        source = PretrainedModelSpec(path=model, chat_template=chat)
    elif isinstance(own, PretrainedModelSpec):
        source = own.model_copy(update={"warm_start": None, "lora": None})
    else:
        raise SpecError(
            f"model.kind is {own.kind!r}: it has no weights before its warm start; only a "
            "pretrained model can answer now"
        )
    dtype = torch.float32 if model is not None else getattr(torch, runner.dtype)
    with (
        RewardPool(workers=runner.reward_workers, memory_mb=runner.reward_memory_mb) as pool,
        load_sampler(source, runner, spec.sampler, dtype) as (policy, sampler),
    ):
        yield LoadedModel(policy, sampler, pool, source, _choose_device(runner))


@contextmanager
def load_sampler(
    source: PretrainedModelSpec, runner: RunnerSpec, sampler: SamplerSpec, dtype: torch.dtype
) -> Iterator[tuple[Policy, SamplingEngine]]:
    require_engine(sampler)
    device = _choose_device(runner)
    torch.set_num_threads(runner.threads)
    policy = build_policy(source, seed=0, dtype=dtype)
    with open_sampler(policy, sampler, runner, device) as engine:
        yield policy, engine


def _choose_device(runner: RunnerSpec) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if runner.device == "cuda" and not has_gpu:
        raise EnvironmentFault(
            "runner.device is 'cuda', but torch finds no CUDA device; run `rlx check` for the "
            "cause, or use the CPU with `--set runner.device=cpu`"
        )
    return torch.device("cuda" if has_gpu and runner.device != "cpu" else "cpu")


FORWARD_STREAMS = ("reference_logprobs", "collision_probs", "values")
"""Streams that take one pass of a model without a gradient."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a training step of a phase with `steps`, measured on a few problems and multiplied
    up.

    Attributes:
        update: the passes of the models over all tokens in the loss mask, and the steps of AdamW;
            None if they were not timed, `untimed` says why.
    """

    phase: str
    steps: int
    sampling: float
    scoring: float
    update: float | None
    untimed: str = ""

    @property
    def step(self) -> float:
        return self.sampling + self.scoring + (self.update or 0.0)

    def describe(self) -> str:
        update = self.untimed if self.update is None else f"update {self.update:.3g} s"
        return (
            f"a step of {self.phase} takes about {self.step:.3g} s here (sampling "
            f"{self.sampling:.3g} s, scoring {self.scoring:.3g} s, {update}); {self.steps} of them "
            f"{format_duration(self.steps * self.step)}"
        )


@dataclass(frozen=True, slots=True)
class ModelTrial:
    """A model's answers in the first phase before it is trained, and the seconds of a step of each
    phase."""

    contact: FirstContact
    seconds: tuple[StepSeconds, ...]

    def to_json(self) -> dict[str, Any]:
        seconds = [{**asdict(one), "step": one.step} for one in self.seconds]
        return {"first_contact": self.contact.to_json(), "seconds": seconds}

    def list_lines(self) -> list[str]:
        lines = [*self.contact.list_lines(), *(one.describe() for one in self.seconds)]
        return [escape_unprintable(line) for line in lines]


def try_model(spec: ExperimentSpec, prompts: int) -> ModelTrial:
    """Samples and scores rollouts of the training problems of a run's first contact, without warm
    start and adapters, and times the parts of a step.

    Raises:
        SpecError: the model is not pretrained, or does not fit the experiment.
        EnvironmentFault: model files or the device are missing.
    """
    setups = [build_setup(spec.resolve_phase_spec(phase)) for phase in spec.phases]
    with load_model(spec) as model:
        tried = [
            _try_phase(model, phase.name, setup, prompts)
            for phase, setup in zip(spec.phases, setups, strict=True)
        ]
        _, trees, table = tried[0]
        decode = model.policy.dialogue.decode_tokens
        contact = describe_first_contact(setups[0], trees, table, decode)
        seconds = []
        for setup, (one, trees, table) in zip(setups, tried, strict=True):
            try:
                update = _time_updates(model, setup, trees, table)
                untimed = "" if update is not None else "no token learns"
            except torch.OutOfMemoryError:
                update, untimed = None, "its update does not fit beside the sampler on one GPU"
            seconds.append(replace(one, update=update, untimed=untimed))
    return ModelTrial(contact, tuple(seconds))


def _try_phase(
    model: LoadedModel, phase: str, setup: PhaseSetup, prompts: int
) -> tuple[StepSeconds, Sequence[RolloutTree], RewardTable]:
    """Answers and scores some problems; the seconds are of a step without its update."""
    problems, seeds = draw_contact_problems(model.policy, setup, prompts)
    host = build_rollout_host(setup, model.pool, model.policy)
    began = time.perf_counter()
    with model.sampler.session() as session:
        dialogue = model.policy.dialogue
        trees = sample_rollout_trees(setup.plan, problems, seeds, session, dialogue, host)
    sampled = time.perf_counter()
    table = score_rollouts(trees, setup.rewards, model.pool)
    scored = time.perf_counter()
    scale = _get_step_scale(setup, trees)
    sampling, scoring = scale * (sampled - began), scale * (scored - sampled)
    return StepSeconds(phase, setup.spec.phases[0].steps, sampling, scoring, None), trees, table


def _get_step_scale(setup: PhaseSetup, trees: Sequence[RolloutTree]) -> float:
    """Problems that a rank has in a step, per problem that was tried."""
    tried = len(trees) // setup.plan.trees_per_prompt
    return setup.spec.rollout.prompts_per_step / tried / setup.spec.runner.ranks


def _time_updates(
    model: LoadedModel, setup: PhaseSetup, trees: Sequence[RolloutTree], table: RewardTable
) -> float | None:
    """Seconds of all passes of a step and of its optimizer steps; None if no token learns."""
    spec, needs = setup.spec, setup.needs
    needs_reward = spec.learns_from_rewards
    without = find_lost_rows(trees, table, needs_reward=needs_reward)
    rows = build_scored_rows(setup, trees, table, without=without)
    if rows is None or not rows.mask.any():
        return None
    if model.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed says on stdout that it chose it
    from rlx.learner import time_update  # imported here: it takes seconds

    one = time_update(
        model.policy, rows.batch, rows.mask, spec.runner, spec.optimizer, model.device
    )
    forward = [spec.loss.old_logprobs == "learner", *(name in needs for name in FORWARD_STREAMS)]
    updates: list[OptimizerSpec | CriticSpec] = [spec.optimizer]
    if spec.critic is not None and "values" in needs:
        updates.append(spec.critic)
    passes = sum(forward) * one.forward
    if spec.model.reference is not None and "reference_logprobs" in needs:
        own = sum(parameter.numel() for parameter in model.policy.model.parameters())
        passes += one.forward * (count_reference_parameters(spec, own) / own - 1)
    passes += sum(each.updates_per_rollout for each in updates) * one.gradient
    steps = sum(each.mini_batches * each.updates_per_rollout for each in updates)
    return _get_step_scale(setup, trees) * passes + steps * one.optimizer


STEP = re.compile(r"latest|[0-9]{1,10}")
SERVED_SECTIONS = ("runner", "sampler")


class EngineSettings(StrictModel):
    runner: RunnerSpec = RunnerSpec.model_construct()
    sampler: SamplerSpec


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that answers requests.

    Attributes:
        max_rows: completions that the engine decodes together.
        folder: the model's folder, GGUF file, or name on the hub.
        run: the run that trained it, if one was named.
        step: of its checkpoint; None for the trained model.
    """

    model: ServedModel
    engine: SamplingEngine
    max_rows: int
    folder: str
    run: RunRecord | None
    step: int | None


@contextmanager
def open_served_model(
    name: str, overrides: Sequence[str], url: str, max_tokens: int
) -> Iterator[OpenModel]:
    """Loads a model and starts its engine, which ends with the block.

    Args:
        name: `RUN`, the trained model of a run; `RUN@STEP` or `RUN@latest`, a checkpoint; or a
            model's folder, GGUF file, or name on the hub.
        overrides: `key=value` of the sections `runner` and `sampler`; a run has its own values.
        max_tokens: length of a message whose request does not limit it.

    Raises:
        SpecError: there is no such run, model or checkpoint.
        InvalidSpec: an override does not fit.
        EnvironmentFault: model files, the engine or the device are missing.
    """
    check_sections(
        overrides,
        SERVED_SECTIONS,
        f"of what is served, only {' and '.join(SERVED_SECTIONS)} may be changed",
    )
    ref, _, step = name.partition("@")
    is_model = expand_path(name).exists() or not RUN_LIKE.fullmatch(ref)
    if not is_model and step and not STEP.fullmatch(step):
        raise SpecError(f"{escape_unprintable(name)}: write RUN@STEP with a number, or RUN@latest")
    run: RunRecord | None = None
    at: int | None = None
    with ExitStack() as stack:
        if is_model:
            found, alias = name, Path(name).name
            source = PretrainedModelSpec(path=name)
            check_model_files(source)
            document = parse_yaml_document("sampler: {}", "the defaults")
        else:
            wanted = int(step) if step.isdigit() else step or None
            target = stack.enter_context(open_target(ref, None, url, wanted))
            document = target.document
            own = ExperimentSpec.model_validate_json(to_json(document.tree)).model
            chat = isinstance(own, PretrainedModelSpec) and own.chat_template
            source = PretrainedModelSpec(path=target.model, chat_template=chat)
            found, alias, run, at = target.name, name, target.run, target.step
        document = apply_overrides(document, overrides)
        tree = document.tree if isinstance(document.tree, dict) else {}
        sections = {name: tree[name] for name in SERVED_SECTIONS if name in tree}
        settings = validate_document_values(EngineSettings, sections, document)
        runner, sampler = settings.runner, settings.sampler
        dtype = getattr(torch, runner.dtype)
        policy, engine = stack.enter_context(load_sampler(source, runner, sampler, dtype))
        with engine.session() as session:
            length = session.context_length
        model = ServedModel(
            found,
            policy,
            length,
            aliases=frozenset({alias}),
            min_temperature=sampler.min_temperature,
            max_tokens=max_tokens,
        )
        yield OpenModel(model, engine, sampler.max_rows, source.path, run, at)
