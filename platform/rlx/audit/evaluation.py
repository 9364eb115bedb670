"""Evaluate an exported model on a suite of held-out sets, batch by batch.

Finished batches are cached in a folder, so an interrupted evaluation resumes where it stopped.
Every problem has its own seeds, so the split into sessions does not change any answer.
"""

import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from rlx.audit.exported_model import resolve_single_device
from rlx.discovery import resolve_plugins
from rlx.errors import SpecError
from rlx.evaluation import ScoredAnswer, read_answers
from rlx.home import format_path
from rlx.model import Policy, build_policy, compute_model_fingerprint
from rlx.recipe import Recipe, build_environment_host, build_recipe
from rlx.reward import RewardPool, score_rollouts
from rlx.rollout import sample_rollout_trees
from rlx.run import Progress, build_prompt_fit
from rlx.sampler import SamplingEngine, open_sampler, require_engine
from rlx.seeding import derive_seed
from rlx.spec import ExperimentSpec, PretrainedModelSpec, SuiteSpec
from rlx.text import escape_unprintable

__all__ = ["EvaluationContext", "answer_suite"]

BATCH = 64
"""Problems that are answered, scored and cached together."""


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """The model under evaluation and the workers that score it.

    Attributes:
        policy: the model.
        sampler: sampling engine with the model's weights.
        pool: workers that score rewards.
        mark: identifies the model's weights.
    """

    policy: Policy
    sampler: SamplingEngine
    pool: RewardPool
    mark: str


def answer_suite(
    spec: ExperimentSpec,
    sets: Mapping[str, ExperimentSpec],
    suite: SuiteSpec,
    model: str,
    mark: str | None,
    kept: Path,
    show: Callable[[Progress], None],
) -> dict[str, list[ScoredAnswer]]:
    """Answers every set of a suite, reusing cached answers sampled with the same settings.

    Args:
        spec: provides runner and sampler; of its model section only the chat template is used.
        sets: the experiment spec of each set, by name.
        suite: how many problems and answers.
        model: folder in the Hugging Face layout, or name on the hub.
        mark: identifier of the model's weights; None computes a digest of its files.
        kept: cache folder of finished batches.
        show: called with the progress, in problems.

    Returns:
        The scored answers of each set, by name.

    Raises:
        SpecError: the model does not fit the experiment.
        EnvironmentFault: model files or the device are missing.
    """
    runner = spec.runner
    require_engine(spec.sampler)
    device = resolve_single_device(runner)
    torch.set_num_threads(runner.threads)
    chat = isinstance(spec.model, PretrainedModelSpec) and spec.model.chat_template
    there = PretrainedModelSpec(path=model, chat_template=chat)
    policy = build_policy(there, seed=0)
    counts = {name: suite.sets[name].problems or suite.problems for name in sets}
    answers: dict[str, list[ScoredAnswer]] = {}
    with (
        RewardPool(workers=runner.reward_workers, memory_mb=runner.reward_memory_mb) as pool,
        open_sampler(policy, spec.sampler, runner, device) as sampler,
    ):
        context = EvaluationContext(policy, sampler, pool, mark or compute_model_fingerprint(there))
        for number, (name, own) in enumerate(sets.items()):
            before = sum(list(counts.values())[:number])

            def report_suite_progress(done: int, name: str = name, before: int = before) -> None:
                show(Progress(name, before + done, sum(counts.values())))

            try:
                answers[name] = _answer_set(
                    build_recipe(own), suite, counts[name], context, kept, report_suite_progress
                )
            except SpecError as error:
                raise SpecError(f"set {name!r} of the suite: {error}") from error
    return answers


def _answer_set(
    recipe: Recipe,
    suite: SuiteSpec,
    count: int,
    context: EvaluationContext,
    kept: Path,
    report: Callable[[int], None],
) -> list[ScoredAnswer]:
    """Answers one set, reading cached batches where there are any."""
    sampling = {"top_k": 1} if suite.greedy else {}
    plan = recipe.plan.copy_with_sampling(suite.samples, **sampling)
    data = derive_seed(suite.seed, "held out")
    folder = kept / _compute_answers_digest(recipe, suite, context)
    found: list[ScoredAnswer] = []
    for first in range(0, count, BATCH):
        report(first)
        numbers = range(first, min(first + BATCH, count))
        # The file name includes the batch size: raising the problem count resamples a partial
        # last batch.
        path = folder / f"{first:06d}_{len(numbers):03d}.json.gz"
        if (batch := _load_answer_batch(path)) is not None:
            found += batch
            continue
        try:
            drawn = build_prompt_fit(context.policy, recipe).draw_held_out(
                lambda n: recipe.task.problem("test", n, data), numbers
            )
        except ValueError as error:  # no problem matches the task's options
            raise SpecError(str(error)) from error
        seeds = [derive_seed(suite.seed, "evaluation", n) for n in drawn.numbers]
        host = build_environment_host(recipe, context.pool)
        with context.sampler.session() as session:
            trees = sample_rollout_trees(
                plan, drawn.problems, seeds, session, context.policy.dialogue, host
            )
        table = score_rollouts(trees, recipe.rewards, context.pool)
        batch = [
            replace(answer, problem=drawn.numbers[answer.problem])
            for answer in read_answers(plan, trees, table, recipe.spec.evaluation.correct)
        ]
        _save_answer_batch(path, json.dumps([answer.to_json() for answer in batch]))
        found += batch
    report(count)
    return found


def _compute_answers_digest(recipe: Recipe, suite: SuiteSpec, context: EvaluationContext) -> str:
    """Digest of everything that determines an answer: the model, the set's spec, the plugins' code
    and data, and the sampling settings; and of what is stored of it."""
    spec, plugins = recipe.spec.dump_resolved(), resolve_plugins(recipe.spec)
    sections = ("task", "rollout", "rewards", "sampler", "evaluation")
    settings = {name: spec[name] for name in sections}
    del settings["evaluation"]["distinct"]  # a suite draws its own problems
    sampling = {"seed": suite.seed, "samples": suite.samples, "greedy": suite.greedy}
    sources = [plugin.sha256 for plugin in plugins.provenance]
    data = [dict(plugin.data()) for plugin in plugins.named]
    stored = [field.name for field in fields(ScoredAnswer)]
    text = json.dumps([settings, sampling, context.mark, sources, data, stored], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _load_answer_batch(path: Path) -> list[ScoredAnswer] | None:
    """Reads a cached batch; None if it is missing or unreadable."""
    try:
        kept = json.loads(gzip.decompress(path.read_bytes()))
        return [ScoredAnswer.from_json(record) for record in kept]
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError) as error:
        reason = f"{format_path(path)} cannot be read ({error})"
        warning = f"warning: {reason}: its problems are answered again"
        print(escape_unprintable(warning), file=sys.stderr, flush=True)
        return None


def _save_answer_batch(path: Path, text: str) -> None:
    """Writes a batch atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        file.write(gzip.compress(text.encode(), mtime=0))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
