"""Supervised warm start: fine-tunes the model on demonstrations of the format and the task."""

import hashlib
import json
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlx import __version__
from rlx.importing import source_digest
from rlx.model.build import Policy
from rlx.model.dialogue import DemonstrationPlayer, ModelDialogue
from rlx.model.files import compute_model_fingerprint
from rlx.plugin import Environment, Plugin, Task
from rlx.sealed_folder import (
    MANIFEST,
    CheckpointError,
    check_sealed_folder,
    sync_folder,
    write_manifest,
)
from rlx.spec import (
    EnvironmentRolloutSpec,
    ExperimentSpec,
    PretrainedModelSpec,
    TinyModelSpec,
    WarmStart,
)
from rlx.spec.reading import locate_examples

WarmStartProgress = Callable[[int, int, float], None]
"""Called with (step, steps, loss)."""

LOSSES = "losses.json"
"""The loss of every step, in the folder of a result."""
SHIPPED, ORIGIN = "warm_starts", "origin.json"
"""Folder of shipped results, beside the shipped experiments; and the file that says how each was
made."""

IGNORED = -100
CPU = torch.device("cpu")
COPIES = 4
"""Float32 copies of the weights that training holds: weights, gradient, and AdamW's moments."""
SHARE = 0.5
"""Fraction of a device's memory that they may take; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class DemonstrationBatches:
    """The batches that a warm start learns from, and their learning rates."""

    warm: WarmStart
    dialogue: ModelDialogue
    player: DemonstrationPlayer

    def build(self, step: int) -> tuple[Tensor, Tensor]:
        """Builds `[B, T]` token ids of a step, from 0, and `[B, T]` bool: True for the policy's
        tokens, which are learned."""
        size = self.warm.batch_size
        rows = [
            self.player.episode(self.dialogue, index)
            for index in range(step * size, (step + 1) * size)
        ]
        length = max(len(episode.token_ids) for episode in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.int64)
        is_own = torch.zeros(len(rows), length, dtype=torch.bool)
        for row, episode in enumerate(rows):
            ids[row, : len(episode.token_ids)] = torch.tensor(episode.token_ids)
            is_own[row, : len(episode.is_own)] = torch.tensor(episode.is_own)
        return ids, is_own

    def compute_rate(self, step: int) -> float:
        """Learning rate: linear warm-up, then linear decay to `final_fraction` of the peak."""
        warm = self.warm
        if step < warm.warmup_steps:
            return warm.learning_rate * ((step + 1) / warm.warmup_steps)
        rest = (step - warm.warmup_steps) / max(1, warm.steps - warm.warmup_steps)
        return warm.learning_rate * (1.0 + (warm.final_fraction - 1.0) * rest)


def build_demonstration_batches(
    policy: Policy, spec: ExperimentSpec, task: Task, environment: Environment | None = None
) -> DemonstrationBatches:
    """The batches of an experiment's warm start, which it must have."""
    assert spec.model.warm_start is not None
    player = DemonstrationPlayer(spec, task, environment)
    return DemonstrationBatches(spec.model.warm_start, policy.dialogue, player)


def warm_start_policy(
    policy: Policy,
    spec: ExperimentSpec,
    task: Task,
    cache: Path,
    progress: WarmStartProgress,
    environment: Environment | None = None,
    tell: Callable[[str], None] = lambda _: None,
    device: torch.device = CPU,
    *,
    use_shipped: bool = True,
) -> Path | None:
    """Trains `policy` in place on the task's demonstrations, or loads the same result from the
    cache.

    A result that is shipped with rlx, for a CPU, goes into the cache in place of training. The
    cache key covers everything that affects the result; a damaged result is named to `tell` and
    made again.

    Args:
        environment: responds to the demonstrations' turns; None if the schedule has none.
        device: trains here if it has enough memory, otherwise on the CPU. The model ends on the
            CPU.

    Returns:
        The folder of the cached result, or None without a warm start.
    """
    if spec.model.warm_start is None:
        return None
    batches = build_demonstration_batches(policy, spec, task, environment)
    device = device if _fits(policy, device) else CPU
    inputs = _list_stage_inputs(batches.player, policy)
    folder = cache / _compute_digest(inputs | ({"device": device.type} if device != CPU else {}))
    if use_shipped and device == CPU and not folder.exists():
        _copy_shipped_result(policy, batches, folder, tell)
    if folder.exists():
        try:
            check_sealed_folder(folder)
            _load_policy(policy, folder)
        except (CheckpointError, FileNotFoundError) as error:
            tell(f"warm start {folder.name} in the cache is not used, and is rebuilt: {error}")
            aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
            with suppress(FileNotFoundError):  # another run was faster
                folder.replace(aside)  # at once, so that no other run finds a part of it
            shutil.rmtree(aside, ignore_errors=True)
        else:
            return folder
    losses: list[float] = []

    def record_loss(step: int, steps: int, loss: float) -> None:
        losses.append(loss)
        progress(step, steps, loss)

    _train_policy(policy, batches, record_loss, device)
    with _fill_folder(folder) as aside:
        policy.save(aside)
        (aside / LOSSES).write_text(json.dumps(losses))
        write_manifest(aside)
    return folder


def _copy_shipped_result(
    policy: Policy, batches: DemonstrationBatches, folder: Path, tell: Callable[[str], None]
) -> None:
    """Copies the result shipped for these settings, if it learned the same demonstrations."""
    source = locate_examples() / SHIPPED / compute_settings_digest(batches.player, policy)
    if not source.is_dir():
        return
    try:
        check_sealed_folder(source)
    except CheckpointError as error:
        tell(f"shipped warm start {source.name} is not used: {error}")
        return
    trained_on = json.loads((source / ORIGIN).read_text())["demonstrations"]
    if trained_on != compute_demonstration_digest(batches):
        tell(f"shipped warm start {source.name} is not used: it learned other demonstrations")
        return
    with _fill_folder(folder) as aside:
        shutil.copytree(source, aside)


def compute_settings_digest(player: DemonstrationPlayer, policy: Policy) -> str:
    """Digest of what an experiment says about its warm start: the name of a shipped result.

    Versions and code are no part of it: `compute_demonstration_digest` tells what they change.
    """
    inputs = _list_stage_inputs(player, policy)
    return _compute_digest({k: v for k, v in inputs.items() if k not in ("rlx", "torch", "code")})


def compute_demonstration_digest(batches: DemonstrationBatches) -> str:
    """Digest of the tokens of the first and the last batch of a warm start."""
    steps = dict.fromkeys((0, batches.warm.steps - 1))
    tokens = [[part.tolist() for part in batches.build(step)] for step in steps]
    return _compute_digest(tokens)


def is_shipped_warm_start(folder: Path) -> bool:
    """Whether a warm start in the cache came with rlx, in place of being trained here."""
    return (folder / ORIGIN).exists()


def read_warm_start_losses(folder: Path) -> list[float]:
    """The loss of every step; none if an earlier version of rlx trained it."""
    file = folder / LOSSES
    return [float(loss) for loss in json.loads(file.read_text())] if file.exists() else []


def _load_policy(policy: Policy, folder: Path) -> None:
    """Replaces the weights by those of a checked result, whose file stays mapped."""
    try:
        cached = type(policy.model).from_pretrained(folder, dtype=torch.float32)
    except OSError as error:
        raise CheckpointError(f"it cannot be loaded: {error}") from error
    own = dict(policy.model.named_parameters())
    for name, parameter in cached.named_parameters():
        own[name].data = parameter.data


@contextmanager
def _fill_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder that takes the place of `folder` once it is complete, unless another run was
    faster."""
    aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    try:
        yield aside
        sync_folder(aside)
        aside.replace(folder)
    except OSError:
        if not (folder / MANIFEST).exists():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fits(policy: Policy, device: torch.device) -> bool:
    """Whether training fits on a device; the same on all ranks, whatever else is there."""
    if device.type == "cpu":
        return True
    _, memory = torch.cuda.mem_get_info(device)
    weights = sum(parameter.numel() for parameter in policy.model.parameters())
    return bool(COPIES * 4 * weights < SHARE * memory)


def _compute_digest(inputs: Any) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20]


def _list_stage_inputs(stage: DemonstrationPlayer, policy: Policy) -> dict[str, Any]:
    """What decides the result of a warm start, besides the kind of device."""
    spec = stage.spec
    resolved = spec.dump_resolved()
    del resolved["model"]["reference"]  # which takes no part
    if resolved["model"]["warm_start"]["demonstrations"] is None:
        del resolved["model"]["warm_start"]["demonstrations"]  # as before there were any others
    plugins = [p for p in (stage.task, stage.environment) if isinstance(p, Plugin)]
    model = spec.model
    tokenizer = files = None
    if isinstance(model, TinyModelSpec):  # a trained one is called `train`, whatever its texts were
        definition = policy.tokenizer.backend_tokenizer.to_str()
        tokenizer = hashlib.sha256(definition.encode()).hexdigest()[:16]
    elif isinstance(model, PretrainedModelSpec):
        files = compute_model_fingerprint(model)
    sources = []
    for plugin in plugins:  # whole packages: the version stays the same while one is developed
        module = type(plugin).__module__
        top = sys.modules[module.partition(".")[0]].__file__
        source = sys.modules[module].__file__ if top is None else top
        sources.append(source_digest(Path(str(source))))
    turns: dict[str, Any] = {n: t.template for n, t in spec.rollout.turn_specs.items()}
    turns |= {f"{n}.stop": list(t.stop) for n, t in spec.rollout.turn_specs.items() if t.stop}
    turns |= {f"{n}.prefix": t.prefix for n, t in spec.rollout.turn_specs.items() if t.prefix}
    turns["system"] = spec.rollout.system
    if spec.rollout.examples:
        turns["examples"] = [example.model_dump() for example in spec.rollout.examples]
    if isinstance(spec.rollout, EnvironmentRolloutSpec):
        keys = ("environment", "max_turns", "forced_answer", "observation")
        turns["environment"] = {key: resolved["rollout"][key] for key in keys}
        turns["environment"] |= {key: resolved["rollout"]["turn"][key] for key in ("stop", "spans")}
    return {
        "rlx": __version__,
        "torch": torch.__version__,
        "seed": spec.seed,
        "model": resolved["model"],
        "tokenizer": tokenizer,
        "files": files,
        "task": resolved["task"],
        "data": [dict(plugin.data()) for plugin in plugins],
        "code": sources,
        "templates": turns,
    }


def _train_policy(
    policy: Policy, batches: DemonstrationBatches, progress: WarmStartProgress, device: torch.device
) -> None:
    # Dropout would draw from the global random generator.
    model, warm = policy.model.to(device).eval(), batches.warm
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=warm.learning_rate,
        betas=warm.betas,
        weight_decay=warm.weight_decay,
    )
    for step in range(warm.steps):
        for group in optimizer.param_groups:
            group["lr"] = batches.compute_rate(step)
        ids, is_own = (tokens.to(device) for tokens in batches.build(step))
        labels = ids.where(is_own, IGNORED)
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
