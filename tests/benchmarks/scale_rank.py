"""What one rank does with a made-up step after sampling it, measured part by part.

    python tests/benchmarks/scale_rank.py ORDER.json       started by scale.py, once for each rank

Functions are those of a run, but for the model: no token is sampled, no log-probability computed
and nothing learned from the packed rows.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from growth import submit_run
from process_use import PartMeter
from scale_parts import RECORDED, Order
from shapes import Shape
from two_turn_step import build_shape, build_step_recipe, build_trees, pieces

from rlx.learner import Ranks
from rlx.learner.share import RankMicroBatches
from rlx.recipe import Recipe
from rlx.record import Recorder, recorder
from rlx.reward import JobPool, RewardPool, RewardTable, score_rollouts
from rlx.rollout import RolloutTree
from rlx.row_rewards import build_scored_rows
from rlx.run import build_trained_rows
from rlx.run.collect import RolloutShare, StepRollouts, _gather_shares
from rlx.run.step_metrics import step_figures
from rlx.run.training import _build_step_statistics
from rlx.spec import RunnerSpec
from rlx.step import assign_credit
from rlx.train_batch import TokenStreams, TrainBatch
from rlx_registry import Registry

__all__ = ["measure_rank"]

BODY, JOURNAL = "rollouts/step_000001.parquet", "journal.jsonl"
SECONDS = dict.fromkeys(("rollout", "reward", "wait", "train", "step"), 1.0)


def measure_rank(order: Order, ranks: Ranks, pool: JobPool) -> dict[str, Any]:
    """Costs of all parts of this rank, and on the first one the sizes of what it has written."""
    shape, meter = Shape(*order.shape), PartMeter()
    recipe = build_step_recipe(shape)
    own = build_trees(shape, recipe, range(shape.prompts)[ranks.rank :: ranks.count])
    with meter.measure("scoring"):
        table = score_rollouts(own, recipe.rewards, pool)
    assert not table.faults, table.faults
    ranks.barrier()  # or waiting for the others would count
    with meter.measure("gathering"):
        share = RolloutShare(own, table, 0.0, 0.0)
        scored = _gather_shares(SimpleNamespace(ranks=ranks), share, shape.prompts, 1)
    trees, table = scored.trees, scored.table
    del own, share, scored
    train = _build_train_batch(meter, trees, table, recipe)
    with meter.measure("packing"):
        limit = recipe.spec.runner.micro_batch_tokens
        RankMicroBatches(train.batch, train.wanted, limit, ranks, merge=True)
    with meter.measure("figures"):
        kinds = recipe.spec.rollout.turns
        figures = step_figures(trees, table, train, None, None, SECONDS, "accuracy", kinds)
    sizes: dict[str, float] = {}
    if ranks.is_first:
        _record_step(meter, order, trees, table, train, figures, recipe)
        sizes = _measure_sizes(Path(order.folder), trees, train)
    return {"costs": meter.costs, "sizes": sizes}


def _measure_sizes(
    folder: Path, trees: Sequence[RolloutTree], train: TrainBatch
) -> dict[str, float]:
    """MB of the files, and how much they describe."""
    return {
        "body": (folder / BODY).stat().st_size / 1e6,
        "journal": (folder / JOURNAL).stat().st_size / 1e6,
        "tokens": sum(len(segment.token_ids) for tree in trees for segment in tree.segments),
        "rows": len(train.batch.rows),
    }


def _build_train_batch(
    meter: PartMeter, trees: list[RolloutTree], table: RewardTable, recipe: Recipe
) -> TrainBatch:
    rollouts = StepRollouts(trees, table, None, frozenset(), len(trees), 0, 0.0, 0.0)
    with meter.measure("rows"):
        without = rollouts.find_untrained_rows()
        rows = build_scored_rows(recipe, trees, table, without=without)
    assert rows is not None
    with meter.measure("credit"):
        streams = TokenStreams(old_logprobs=rows.batch.behaviour_logprobs)
        return assign_credit(rows, streams, recipe.rules)


def _record_step(
    meter: PartMeter,
    order: Order,
    trees: list[RolloutTree],
    table: RewardTable,
    train: TrainBatch,
    figures: Mapping[str, float],
    recipe: Recipe,
) -> None:
    """Records the step as a run does, and then its rows again in every further registry."""
    folder = Path(order.folder)
    written: list[Mapping[str, Any]] = []
    (first, url), *others = order.registries.items()
    with Registry.open(url) as registry, _watch_recorder(meter, first, written):
        writer = Recorder(registry, submit_run(registry, folder), keep_bodies=True)
        with meter.measure("trained rows"):
            rows = build_trained_rows(train)
        statistics = _build_step_statistics(train, "joint", recipe, 0)
        path = folder / BODY
        writer.step(1, figures, trees, table, rows, statistics, path, pieces=pieces)
        writer.finish_step()
    for name, url in others:
        with Registry.open(url) as registry:
            writer = Recorder(registry, submit_run(registry, folder / name), keep_bodies=True)
            with meter.measure(name):
                writer._write_step(1, figures, {**written[0], "path": BODY})


@contextmanager
def _watch_recorder(
    meter: PartMeter, registry: str, written: list[Mapping[str, Any]]
) -> Iterator[None]:
    """Measures the parts of a recorded step, and keeps what is written to the registry."""
    plain = {name: getattr(recorder, name) for name in RECORDED}
    write_step = Recorder._write_step

    def write(self: Recorder, step: int, figures: Mapping[str, float], body: Any) -> None:
        written.append(body)
        with meter.measure(registry):
            write_step(self, step, figures, body)

    for name, part in RECORDED.items():
        setattr(recorder, name, meter.watch_calls(part, plain[name]))
    Recorder._write_step = write
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(recorder, name, function)
        Recorder._write_step = write_step


def main(order: Path) -> None:
    """Joins the other ranks and writes what this one measured beside the order."""
    asked = Order(**json.loads(order.read_text()))
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if count > 1:
        dist.init_process_group("gloo")
    ranks, runner = Ranks(rank, count, torch.device("cpu")), RunnerSpec()
    with RewardPool(runner.reward_workers, runner.reward_memory_mb) as pool:
        measure_rank(_shrink_order(asked, count), ranks, pool)  # what is imported and made once
        found = measure_rank(asked, ranks, pool)
    (order.parent / f"rank{rank}.json").write_text(json.dumps(found))
    if count > 1:
        dist.destroy_process_group()


def _shrink_order(order: Order, ranks: int) -> Order:
    """A step of one short prompt for each rank, in a folder and a registry of its own."""
    little = build_shape(16 * ranks, 240)
    registries = {"SQLite": f"sqlite:///{order.folder}.db"}
    return Order(f"{order.folder}-little", astuple(little), registries)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
