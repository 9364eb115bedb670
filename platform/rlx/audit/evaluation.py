"""A suite of held-out sets, answered by an exported model, batch by batch.

What has been answered is kept in a folder, so an evaluation that is stopped goes on where it was:
every problem has seeds of its own, so batches may be answered in any number of sittings.
"""

import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from rlx.run import Progress
from rlx.sampler import SamplingEngine, open_sampler, require_engine
from rlx.seeding import derive_seed
from rlx.spec import ExperimentSpec, PretrainedModelSpec, SuiteSpec
from rlx.text import escape_unprintable

__all__ = ["EvaluationContext", "answer_suite"]

BATCH = 64
"""Problems that are answered, scored and kept together."""


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """Who answers.

    Attributes:
        policy: the model.
        sampler: with its weights.
        pool: where rewards are scored.
        mark: stands for the model's weights.
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
    """Answers every set, but what was answered before in the same way.

    Args:
        spec: runner and sampler; of its model only the chat template is asked.
        sets: the experiment as it stands for each set, by name.
        suite: how many problems and answers.
        model: its folder in the Hugging Face layout, or its name on the hub.
        mark: what stands for its weights; None makes a digest of its files.
        kept: folder of what has been answered.
        show: told how far it is, in problems.

    Raises:
        SpecError: the model does not fit the experiment.
        EnvironmentFault: files of the model, or the device, are missing.
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
        means = EvaluationContext(policy, sampler, pool, mark or compute_model_fingerprint(there))
        for number, (name, own) in enumerate(sets.items()):
            before = sum(list(counts.values())[:number])

            def report_suite_progress(done: int, name: str = name, before: int = before) -> None:
                show(Progress(name, before + done, sum(counts.values())))

            try:
                answers[name] = _answer_set(
                    build_recipe(own), suite, counts[name], means, kept, report_suite_progress
                )
            except SpecError as error:
                raise SpecError(f"set {name!r} of the suite: {error}") from error
    return answers


def _answer_set(
    recipe: Recipe,
    suite: SuiteSpec,
    count: int,
    means: EvaluationContext,
    kept: Path,
    tell: Callable[[int], None],
) -> list[ScoredAnswer]:
    """One set, from what is kept where it can be."""
    sampling = {"top_k": 1} if suite.greedy else {}
    plan = recipe.plan.copy_with_sampling(suite.samples, **sampling)
    data = derive_seed(suite.seed, "held out")
    folder = kept / _compute_answers_digest(recipe, suite, means)
    found: list[ScoredAnswer] = []
    for first in range(0, count, BATCH):
        tell(first)
        numbers = range(first, min(first + BATCH, count))
        # A last batch that is smaller is another file: asking for more problems answers it anew.
        path = folder / f"{first:06d}_{len(numbers):03d}.json.gz"
        if (batch := _load_answer_batch(path)) is not None:
            found += batch
            continue
        try:
            problems = [recipe.task.problem("test", n, data) for n in numbers]
        except ValueError as error:  # no problem is like what the options ask for
            raise SpecError(str(error)) from error
        seeds = [derive_seed(suite.seed, "evaluation", n) for n in numbers]
        host = build_environment_host(recipe, means.pool)
        with means.sampler.session() as session:
            trees = sample_rollout_trees(
                plan, problems, seeds, session, means.policy.dialogue, host
            )
        table = score_rollouts(trees, recipe.rewards, means.pool)
        batch = read_answers(trees, table, recipe.spec.evaluation.correct, first=first)
        _save_answer_batch(path, json.dumps([answer.to_json() for answer in batch]))
        found += batch
    tell(count)
    return found


def _compute_answers_digest(recipe: Recipe, suite: SuiteSpec, means: EvaluationContext) -> str:
    """What decides an answer: the model, the set's experiment, the plugins' code and data, and how
    it is sampled."""
    spec, plugins = recipe.spec.dump_resolved(), resolve_plugins(recipe.spec)
    said = {name: spec[name] for name in ("task", "rollout", "rewards", "sampler", "evaluation")}
    how = {"seed": suite.seed, "samples": suite.samples, "greedy": suite.greedy}
    made_of = [plugin.sha256 for plugin in plugins.provenance]
    data = [dict(plugin.data()) for plugin in plugins.named]
    text = json.dumps([said, how, means.mark, made_of, data], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _load_answer_batch(path: Path) -> list[ScoredAnswer] | None:
    """A batch that was answered before; None where there is none that can be read."""
    try:
        kept = json.loads(gzip.decompress(path.read_bytes()))
        return [ScoredAnswer.from_json(record) for record in kept]
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError) as error:
        why = escape_unprintable(str(error))
        said = (
            f"warning: {format_path(path)} cannot be read ({why}): its problems are answered anew"
        )
        print(said, file=sys.stderr, flush=True)
        return None


def _save_answer_batch(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        file.write(gzip.compress(text.encode(), mtime=0))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
