"""Supervised warm starts: the model learns the format, and some of the task, from demonstrations.

Many demonstrations are poor on purpose: what is left to reinforcement learning is to tell the good
from the poor.
"""

import hashlib
import json
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlx import __version__
from rlx.model.build import Policy
from rlx.model.dialogue import ModelDialogue
from rlx.model.episodes import DemonstrationPlayer
from rlx.model.files import compute_model_fingerprint
from rlx.plugin import Environment, Plugin, Task
from rlx.sources import source_digest
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec, PretrainedModelSpec, WarmStart

__all__ = ["warm_start_policy"]

Progress = Callable[[int, int, float], None]
"""Called with (step, steps, loss)."""

IGNORED = -100
WEIGHTS = "model.safetensors"


def warm_start_policy(
    policy: Policy,
    spec: ExperimentSpec,
    task: Task,
    cache: Path,
    progress: Progress,
    environment: Environment | None = None,
) -> Path | None:
    """Trains `policy` on the task's demonstrations, or loads the same result from the cache.

    The cache key covers everything that decides the result: model, task options and code,
    templates, seed, the library's version. Training mutates `policy.model` in place.

    Args:
        policy: freshly built; its weights are overwritten.
        spec: the experiment; nothing happens unless `model.warm_start` is given.
        task: where demonstrations come from.
        cache: folder of earlier results.
        progress: told about every step.
        environment: what answers the demonstrations' turns; None where nothing does.

    Returns:
        The folder of the cached result, or None without a warm start.
    """
    warm = spec.model.warm_start
    if warm is None:
        return None
    stage = DemonstrationPlayer(spec, task, environment)
    folder = cache / _compute_stage_digest(stage)
    if not (folder / WEIGHTS).exists():
        _train_policy(policy, warm, stage, progress)
        _save_policy(policy, folder)
    kept = type(policy.model).from_pretrained(folder, dtype=torch.float32)
    policy.model.load_state_dict(kept.state_dict())
    return folder


def _save_policy(policy: Policy, folder: Path) -> None:
    """Saves to `folder`, whole or not at all; of two runs that do, the first one's result stays."""
    aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    try:
        policy.save(aside)
        aside.replace(folder)
    except OSError:
        if not (folder / WEIGHTS).exists():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _compute_stage_digest(stage: DemonstrationPlayer) -> str:
    spec = stage.spec
    said = spec.dump_resolved()
    plugins = [p for p in (stage.task, stage.environment) if isinstance(p, Plugin)]
    turns: dict[str, Any] = {n: t.template for n, t in spec.rollout.turn_specs.items()}
    turns |= {f"{n}.stop": list(t.stop) for n, t in spec.rollout.turn_specs.items() if t.stop}
    turns["system"] = spec.rollout.system
    if isinstance(spec.rollout, EnvironmentRolloutSpec):
        keys = ("environment", "max_turns", "forced_answer", "observation")
        turns["environment"] = {key: said["rollout"][key] for key in keys}
        turns["environment"] |= {key: said["rollout"]["turn"][key] for key in ("stop", "spans")}
    decides = {
        "rlx": __version__,
        "torch": torch.__version__,
        "seed": spec.seed,
        "model": said["model"],
        "files": compute_model_fingerprint(spec.model)
        if isinstance(spec.model, PretrainedModelSpec)
        else None,
        "task": said["task"],
        "data": [dict(plugin.data()) for plugin in plugins],
        "code": [_compute_source_digest(type(plugin).__module__) for plugin in plugins],
        "templates": turns,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:20]


def _compute_source_digest(module: str) -> str:
    """Digest of the package that a plugin's module is in.

    A plugin that is being written keeps its version while its demonstrations change.
    """
    top = sys.modules[module.partition(".")[0]].__file__
    return source_digest(Path(str(sys.modules[module].__file__ if top is None else top)))


def _train_policy(
    policy: Policy, warm: WarmStart, stage: DemonstrationPlayer, progress: Progress
) -> None:
    model = policy.model.eval()  # dropout would draw from a global stream
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=warm.learning_rate,
        betas=warm.betas,
        weight_decay=warm.weight_decay,
    )
    for step in range(warm.steps):
        for group in optimizer.param_groups:
            group["lr"] = warm.learning_rate * _compute_rate_factor(step, warm)
        ids, labels = _build_demonstration_batch(policy.dialogue, stage, warm, step)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), warm.max_grad_norm)
        optimizer.step()
        progress(step + 1, warm.steps, float(loss.detach()))
    optimizer.zero_grad()  # or the first step of training would add the last gradient to its own


def _compute_rate_factor(step: int, warm: WarmStart) -> float:
    """Share of the peak learning rate: linear up, then linear down to `final_fraction`."""
    if step < warm.warmup_steps:
        return (step + 1) / warm.warmup_steps
    rest = (step - warm.warmup_steps) / max(1, warm.steps - warm.warmup_steps)
    return 1.0 + (warm.final_fraction - 1.0) * rest


def _build_demonstration_batch(
    dialogue: ModelDialogue, stage: DemonstrationPlayer, warm: WarmStart, step: int
) -> tuple[Tensor, Tensor]:
    """`[B, T]` token ids and labels of one batch; what others write is not learned."""
    rows = [
        stage.episode(dialogue, index)
        for index in range(step * warm.batch_size, (step + 1) * warm.batch_size)
    ]
    length = max(len(episode.token_ids) for episode in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full((len(rows), length), IGNORED)
    for row, episode in enumerate(rows):
        tokens = torch.tensor(episode.token_ids)
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = tokens.where(torch.tensor(episode.is_own), IGNORED)
    return ids, labels
