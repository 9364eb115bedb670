"""Supervised warm start: fine-tunes the model on demonstrations of the format and the task.

Results are cached in sealed folders: a damaged one is named and rebuilt.

Many demonstrations are poor on purpose, so that reinforcement learning has something to improve:
telling good responses from poor ones.
"""

import hashlib
import json
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from rlx.sealing import MANIFEST, CheckpointError, check_sealed_folder, sync_folder, write_manifest
from rlx.sources import source_digest
from rlx.spec import (
    EnvironmentRolloutSpec,
    ExperimentSpec,
    PretrainedModelSpec,
    TinyModelSpec,
    WarmStart,
)

__all__ = ["read_warm_start_losses", "warm_start_policy"]

Progress = Callable[[int, int, float], None]
"""Called with (step, steps, loss)."""

LOSSES = "losses.json"
"""The loss of every step, in the folder of a result."""

IGNORED = -100
CPU = torch.device("cpu")
COPIES = 4
"""Float32 copies of the weights that training holds: weights, gradient, and AdamW's moments."""
SHARE = 0.5
"""Fraction of a device's memory that they may take; the rest is for activations."""


def warm_start_policy(
    policy: Policy,
    spec: ExperimentSpec,
    task: Task,
    cache: Path,
    progress: Progress,
    environment: Environment | None = None,
    tell: Callable[[str], None] = lambda _: None,
    device: torch.device = CPU,
) -> Path | None:
    """Trains `policy` on the task's demonstrations, or loads the same result from the cache.

    The cache key covers everything that affects the result: model, task options and code,
    templates, seed, kind of device, and the library's version. Training mutates `policy.model` in
    place.

    Args:
        policy: freshly built; its weights are overwritten.
        spec: the experiment; a no-op without `model.warm_start`.
        task: provides the demonstrations.
        cache: folder of earlier results.
        progress: called after every step.
        environment: responds to the demonstrations' turns; None if the schedule has none.
        tell: called with a message if the cached result is damaged.
        device: trains here if it has enough memory, otherwise on the CPU. The model ends on the
            CPU.

    Returns:
        The folder of the cached result, or None without a warm start.
    """
    warm = spec.model.warm_start
    if warm is None:
        return None
    stage = DemonstrationPlayer(spec, task, environment)
    device = device if _fits(policy, device) else CPU
    folder = cache / _compute_stage_digest(stage, policy, device)
    if folder.exists():
        try:
            check_sealed_folder(folder)
            _load_policy(policy, folder)
        except (CheckpointError, FileNotFoundError) as error:
            tell(f"warm start {folder.name} in the cache is not used, and is rebuilt: {error}")
            _remove_folder(folder)
        else:
            return folder
    losses: list[float] = []

    def record_loss(step: int, steps: int, loss: float) -> None:
        losses.append(loss)
        progress(step, steps, loss)

    _train_policy(policy, warm, stage, record_loss, device)
    _save_policy(policy, folder, losses)
    return folder


def read_warm_start_losses(folder: Path) -> list[float]:
    """Returns the loss of every step of a warm start; none if an earlier version of rlx trained
    it."""
    file = folder / LOSSES
    return [float(loss) for loss in json.loads(file.read_text())] if file.exists() else []


def _load_policy(policy: Policy, folder: Path) -> None:
    """Replaces the weights by those of a checked result, whose file stays mapped.

    Raises:
        CheckpointError: another run removes it meanwhile.
    """
    try:
        cached = type(policy.model).from_pretrained(folder, dtype=torch.float32)
    except OSError as error:
        raise CheckpointError(f"it cannot be loaded: {error}") from error
    own = dict(policy.model.named_parameters())
    for name, parameter in cached.named_parameters():
        own[name].data = parameter.data


def _save_policy(policy: Policy, folder: Path, losses: Sequence[float]) -> None:
    """Saves to `folder` atomically; if another run has saved there already, its result is kept."""
    aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    try:
        policy.save(aside)
        (aside / LOSSES).write_text(json.dumps(losses))
        write_manifest(aside)
        sync_folder(aside)
        aside.replace(folder)
    except OSError:
        if not (folder / MANIFEST).exists():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _remove_folder(folder: Path) -> None:
    """Removes a folder at once, so that no other run finds a part of it."""
    aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):  # another run was faster
        folder.replace(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _fits(policy: Policy, device: torch.device) -> bool:
    """Whether training fits on a device; the same on all ranks, whatever else is there."""
    if device.type == "cpu":
        return True
    _, memory = torch.cuda.mem_get_info(device)
    weights = sum(parameter.numel() for parameter in policy.model.parameters())
    return bool(COPIES * 4 * weights < SHARE * memory)


def _compute_stage_digest(stage: DemonstrationPlayer, policy: Policy, device: torch.device) -> str:
    spec = stage.spec
    resolved = spec.dump_resolved()
    if resolved["model"]["warm_start"]["demonstrations"] is None:
        del resolved["model"]["warm_start"]["demonstrations"]  # as before there were any others
    plugins = [p for p in (stage.task, stage.environment) if isinstance(p, Plugin)]
    turns: dict[str, Any] = {n: t.template for n, t in spec.rollout.turn_specs.items()}
    turns |= {f"{n}.stop": list(t.stop) for n, t in spec.rollout.turn_specs.items() if t.stop}
    turns["system"] = spec.rollout.system
    if isinstance(spec.rollout, EnvironmentRolloutSpec):
        keys = ("environment", "max_turns", "forced_answer", "observation")
        turns["environment"] = {key: resolved["rollout"][key] for key in keys}
        turns["environment"] |= {key: resolved["rollout"]["turn"][key] for key in ("stop", "spans")}
    inputs = {
        "rlx": __version__,
        "torch": torch.__version__,
        "seed": spec.seed,
        "model": resolved["model"],
        "tokenizer": _compute_tokenizer_digest(policy)
        if isinstance(spec.model, TinyModelSpec)
        else None,
        "files": compute_model_fingerprint(spec.model)
        if isinstance(spec.model, PretrainedModelSpec)
        else None,
        "task": resolved["task"],
        "data": [dict(plugin.data()) for plugin in plugins],
        "code": [_compute_source_digest(type(plugin).__module__) for plugin in plugins],
        "templates": turns,
    }
    if policy.matmul.library != "torch":  # whose results have had no name
        inputs["matmul"] = policy.matmul.library
    if device.type != "cpu":
        inputs["device"] = device.type
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20]


def _compute_tokenizer_digest(policy: Policy) -> str:
    """A trained tokenizer has the name `train`, whatever texts it was trained on."""
    return hashlib.sha256(policy.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16]


def _compute_source_digest(module: str) -> str:
    """Returns the digest of the package that contains a plugin's module.

    The version alone is not enough: it does not change while a plugin is being developed.
    """
    top = sys.modules[module.partition(".")[0]].__file__
    return source_digest(Path(str(sys.modules[module].__file__ if top is None else top)))


def _train_policy(
    policy: Policy,
    warm: WarmStart,
    stage: DemonstrationPlayer,
    progress: Progress,
    device: torch.device,
) -> None:
    # Dropout would draw from the global random generator.
    model = policy.model.to(device).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=warm.learning_rate,
        betas=warm.betas,
        weight_decay=warm.weight_decay,
    )
    for step in range(warm.steps):
        for group in optimizer.param_groups:
            group["lr"] = warm.learning_rate * _compute_rate_factor(step, warm)
        batch = _build_demonstration_batch(policy.dialogue, stage, warm, step)
        ids, labels = (tokens.to(device) for tokens in batch)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), warm.max_grad_norm)
        optimizer.step()
        progress(step + 1, warm.steps, float(loss.detach()))
    optimizer.zero_grad()  # otherwise the first training step would add this gradient to its own
    model.to(CPU)


def _compute_rate_factor(step: int, warm: WarmStart) -> float:
    """Fraction of the peak learning rate: linear warm-up, then linear decay to `final_fraction`."""
    if step < warm.warmup_steps:
        return (step + 1) / warm.warmup_steps
    rest = (step - warm.warmup_steps) / max(1, warm.steps - warm.warmup_steps)
    return 1.0 + (warm.final_fraction - 1.0) * rest


def _build_demonstration_batch(
    dialogue: ModelDialogue, stage: DemonstrationPlayer, warm: WarmStart, step: int
) -> tuple[Tensor, Tensor]:
    """Builds `[B, T]` token ids and labels of one batch; only the policy's tokens have labels."""
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
