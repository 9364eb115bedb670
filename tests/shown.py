"""A registry that has something of everything that a page shows, every free text as one likes."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import update

from rlx.batch import build_token_batch
from rlx.plugin import Problem
from rlx.record.recorder import Recorder
from rlx.record.rollouts import TOKEN_COLUMNS, Role, TrainedRows
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import NO_PARENT, RolloutTree, Segment
from rlx.text import replace_surrogates
from rlx_registry import DeviceRequest, Registry, models

BINS = [
    {"low": 0.0, "high": 0.5, "n": 0, "confidence": None, "accuracy": None},
    {"low": 0.5, "high": 1.0, "n": 9, "confidence": 0.8, "accuracy": 0.75}
    | {"accuracy_low": 0.5, "accuracy_high": 0.9},
]
SILENT = 1
"""A group of `grown` in which no advantage differs from 0."""
NAME = 300
"""Characters of a metric's name: a page asks for curves by their names, in an address."""
FILLED = 4
"""Trees of one answer each: with the two others they are more than one screen."""


def sure(text: str) -> str:
    """A text as Parquet can hold it: a lone surrogate is no character."""
    return replace_surrogates(text)


def _prompt(parent: int, text: str) -> Segment:
    return Segment(parent=parent, author="prompt", token_ids=(1, 4), text=text)


def _turn(parent: int, text: str, kind: str = "answer", number: int = 1, **changes: Any) -> Segment:
    ids = (3, 4, 5) if kind == "answer" else (6, 7)
    fields = {
        "parent": parent,
        "author": "policy",
        "token_ids": ids,
        "logprobs": tuple(-1 / (i + 2) for i in ids),
        "turn": number,
        "kind": kind,
        "finish_reason": "stop",
        "text": text,
        "seed": 7,
    }
    return Segment(**(fields | changes))


def grown(text: str) -> list[RolloutTree]:
    """Answers with confidences below them, a chain with observations, and more of the former."""
    two_turn = RolloutTree(
        Problem(id=f"p0 {text}", prompt=f"prompt {text}", fields={"said": text}, stratum=text),
        (
            _prompt(NO_PARENT, f"asked {text}"),
            _turn(0, f"first {text}"),
            _turn(0, f"second {text}", finish_reason=f"why {text}"),
            _prompt(1, f"sure {text}"),
            *(_turn(3, f"0.{i} {text}", kind=f"kind {text}", number=2) for i in (7, 2)),
            _prompt(2, f"sure {text}"),
            *(_turn(6, f"0.{i} {text}", kind=f"kind {text}", number=2) for i in (5, 6)),
        ),
    )
    chain = RolloutTree(
        Problem(id=f"p1 {text}", prompt=text, fields={}),
        (
            _prompt(NO_PARENT, text),
            _turn(0, f"query {text}", kind="query"),
            Segment(parent=1, author="environment", token_ids=(4, 9), text=f"seen {text}"),
            _turn(2, f"reply {text}", number=2),
        ),
    )
    others = [
        RolloutTree(
            Problem(id=f"p{n}", prompt="?", fields={}), (_prompt(NO_PARENT, "?"), _turn(0, "ok"))
        )
        for n in range(2, 2 + FILLED)
    ]
    return [two_turn, chain, *others]


def _entry(name: str, raw: float | None, weight: float, reason: str | None) -> RewardEntry:
    return RewardEntry(name, raw, weight, "absent" if raw is None else "scored", reason)


def _scored(text: str) -> RewardTable:
    right, logged = f"right {text}", f"_logged {text}"
    brier, whole = f"brier {text}", f"whole {text}"

    def answer(raw: float | None, reason: str | None) -> dict[str, RewardEntry]:
        return {
            right: _entry(right, raw, 2.0, reason),
            "short": _entry("short", 0.25, 1.0, None),
            logged: _entry(logged, 3.0, 1.0, reason),
        }

    def sure(raw: float | None, reason: str | None = None) -> dict[str, RewardEntry]:
        return {brier: _entry(brier, raw, 1.0, reason)}

    turns = {
        (0, 1): answer(1.0, None),
        (0, 2): answer(0.0, f"wrong {text}"),
        (0, 4): sure(0.91),
        (0, 5): sure(None, f"broken {text}"),
        (0, 7): sure(0.75),
        (0, 8): sure(0.75),
        (1, 1): {},
        (1, 3): {"short": _entry("short", -1.0, 1.0, None)},
        **{(2 + n, 1): {"short": _entry("short", 0.5, 1.0, None)} for n in range(FILLED)},
    }
    rollouts = {(1, 3): {whole: _entry(whole, 0.5, 2.0, text)}}
    return RewardTable(turns, frozenset(), {brier: 1}, rollouts)


def _rows(trees: list[RolloutTree], seed: int) -> TrainedRows:
    """Every column that there is, but one that the step has not."""
    batch = build_token_batch(trees)
    rng = torch.Generator().manual_seed(seed)
    shape = batch.token_ids.shape
    noise = {
        name: (5 * torch.randn(shape, generator=rng)).to(dtype)
        for name, dtype in TOKEN_COLUMNS.items()
    }
    silent = (batch.group_ids == 2).unsqueeze(1)
    tokens: dict[str, Any] = {**noise, "mask": batch.is_own & batch.is_token, "values": None}
    tokens["advantages"] = noise["advantages"].masked_fill(silent, 0.0)
    places = [(r.tree, r.segment, r.parent, r.kind, r.level) for r in batch.rows]
    scores = {"total_score": torch.arange(len(places)) / 8}
    return TrainedRows(places, batch.group_ids, batch.is_own, tokens, scores)


def steps(registry: Registry, run_id: str, folder: Path, text: str) -> None:
    """Three recorded steps of the same trees, each with figures of its own."""
    recorder = Recorder(registry, run_id, keep_bodies=True)
    trees, table = grown(sure(text)), _scored(sure(text))
    roles: list[Role] = [*("trained" for _ in range(5)), "greedy"]
    for step in (1, 2, 3):
        figures = {
            "train/reward": step / 4,
            "perf/step_s": 2.0,
            "perf/tokens_per_s": 100.0,
            f"rewards/{sure(text)[:NAME]}/mean": 0.25,
            f"odd/{sure(text)[:NAME]}": math.sqrt(step),
        }
        statistics = {"phase": text, "beta": 0.125, "note": text}
        recorder.step(
            step, figures, trees, table, _rows(trees, step), statistics,
            folder / f"rollouts/{step}.parquet", roles,
            pieces=lambda ids: [f"{text}\n" if i == 4 else f"<{i}>" for i in ids],
        )  # fmt: skip
    recorder.finish_step()


def _spec(text: str) -> dict[str, Any]:
    return {
        "name": text,
        "note": text,
        "tracking": {"mlflow": "sqlite:///mlflow.db"},
        "estimator": {"name": "grpo", "eps": 1e-6, "said": text},
        "mask": {"strategy": "turn_spans"},
        "credit": {"use_kl_in_reward": True},
        "phases": [{"name": text, "steps": 3, "set": {"estimator.eps": 0.5}}],
    }


def _evaluated(registry: Registry, run_id: str, text: str) -> None:
    for label, step, right in (("before", 0, 0.25), ("after", 3, 0.625)):
        metrics: Mapping[str, Any] = {
            "odd": {text: 1.5},
            "brier": 0.2,
            "accuracy": right,
            "bins": BINS,
            "risk_coverage": [[0.5, 0.25], [1.0, 1 - right]],
            "intervals": {"accuracy": [right - 0.1, right + 0.1]},
        }
        registry.results.add_evaluation(run_id, step, label, text, 600, metrics)
        registry.results.add_metrics(run_id, step, {"eval/held_out/accuracy": right})
    bands = [{"mean": m, "low": m - 0.1, "high": m + 0.1} for m in (0.1, 0.4, 0.9)]
    probed = {"p_correct": bands, "same": bands, "said": text}
    registry.results.add_evaluation(run_id, 3, "after", f"probe/{text}", 6, probed)


def shown(registry: Registry, folder: Path, text: str = "plain") -> None:
    """Two runs of one experiment, two seeds, that differ in nothing else: one finished, one that
    goes on and holds a device; both are asked about everything. Nothing of `text` is looked at."""
    for seed in (0, 1):
        run, _ = registry.submit(
            digest="d" * 64, seed=seed, name=text, spec=_spec(text), yaml=f"name: {text}\n",
            plugins=[
                {"kind": "estimator", "name": "grpo", "distribution": text,
                 "options": {"eps": 1e-6, "ddof": 1}}
            ],
            code={"commit": text}, environment={"torch": text},
        )  # fmt: skip
        directory = folder / "runs" / run.id
        directory.mkdir(parents=True)
        origins = {"name": text, "note": f"--set {text}", "estimator.eps": "default"}
        registry.update_run(run.id, directory=directory, origins=origins, host=text, pid=8)
        registry.update_run(run.id, steps_total=10, mlflow_run_id="m1", mlflow_experiment_id="1")
        devices = DeviceRequest(text, (f"{text}:{seed}",), 1)
        registry.start(run.id, ["submitted"], text, devices=devices)
        steps(registry, run.id, directory, text)
        _evaluated(registry, run.id, text)
        registry.update_run(run.id, phase=text)
        registry.results.add_event(run.id, text, text, {"payload": text}, level="warning")
        registry.results.add_checkpoint(run.id, 3, "checkpoints/3", 4096, "c" * 64)
        registry.results.add_artifact(run.id, "spec.json", text)
    registry.transition("1", ["running"], "finished", text)
    _lives_on(registry, "r-0002")


def submit(
    registry: Registry,
    seed: int = 0,
    name: str = "rlcr",
    digest: str = "d",
    status: str = "finished",
    spec: dict[str, Any] | None = None,
    plugins: Sequence[dict[str, Any]] = (),
    **held_out: float,
) -> str:
    """A run without rollouts, in a status, with figures after its last step."""
    run, _ = registry.submit(
        digest=digest * 64, seed=seed, name=name, spec=spec or {}, yaml="", plugins=list(plugins),
        code={}, environment={}, again=True, queue=status == "queued",
    )  # fmt: skip
    if status not in ("submitted", "queued"):
        registry.transition(run.id, ["submitted"], "running")
    for figure, value in held_out.items():
        registry.results.add_metrics(run.id, 5, {f"eval/held_out/{figure}": value})
    if status not in ("submitted", "queued", "running"):
        registry.transition(run.id, ["running"], status, "because")
    return run.id


def _lives_on(registry: Registry, run_id: str) -> None:
    """Lets a run be alive as long as the tests go on; in truth its supervisor would say so."""
    run, tomorrow = models.run, time.time() + 86400
    with registry.open_writer() as connection:
        connection.execute(
            update(run).where(run.c.id == int(run_id[2:])).values(heartbeat=tomorrow)
        )


def silence(registry: Registry, run_id: str, seconds: float = 1000) -> None:
    """Lets a run have shown no sign of life for so long."""
    then, run = time.time() - seconds, models.run
    values = {"heartbeat": then, "started": then, "created": then}
    with registry.open_writer() as connection:
        connection.execute(update(run).where(run.c.id == int(run_id[2:])).values(**values))
