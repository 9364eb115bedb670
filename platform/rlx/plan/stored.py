"""Row accounts of rollouts that a run has stored."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError
from torch import Tensor

from rlx.batch import build_token_batch
from rlx.errors import RegistryError
from rlx.plan.row_report import RowAccount, RowAccountBuilder, place_named_rewards
from rlx.reward import RewardTable
from rlx.rollout import RolloutTree, build_piece_splitter
from rlx.row_rewards import build_row_rewards
from rlx.spec import CreditSpec, ExperimentSpec, ModelSpec
from rlx.trial import EncodingDialogue

__all__ = ["TrainedRowsLike", "load_phase_spec", "load_run_speech", "stored_accounts"]


def load_phase_spec(resolved: Mapping[str, Any], phase: str) -> ExperimentSpec:
    """Returns a run's experiment with the settings of one phase.

    Args:
        resolved: the resolved spec from the registry.
        phase: name of the phase.

    Raises:
        RegistryError: another version of rlx wrote it.
    """
    try:
        spec = ExperimentSpec.from_record(resolved)
        return spec.resolve_phase_spec(next(p for p in spec.phases if p.name == phase))
    except (ValidationError, StopIteration) as error:
        raise RegistryError(
            "this version of rlx cannot read the experiment of this run; use the version that "
            "recorded it"
        ) from error


def load_run_speech(spec: ModelSpec, tokenizer: Path, exported: Path) -> EncodingDialogue | None:
    """The dialogue of a run's model, from its initial files or its export; None without them.

    Args:
        spec: the `model:` section.
        tokenizer: `RunFolder.tokenizer`.
        exported: `RunFolder.model`.
    """
    from rlx.model import folder_dialogue, load_local_dialogue

    dialogue = load_local_dialogue(spec, tokenizer)
    if dialogue is None and (exported / "config.json").is_file():
        return folder_dialogue(exported, chat_template=getattr(spec, "chat_template", False))
    return dialogue


class TrainedRowsLike(Protocol):
    """The trained rows of a stored step; see `rlx.record.rollouts.TrainedRows`."""

    @property
    def places(self) -> Sequence[tuple[int, int, int, str, int]]:
        """(tree, segment, parent segment, kind, level) of each row."""
        ...

    @property
    def groups(self) -> Tensor:
        """`[B]` int64."""
        ...

    @property
    def tokens(self) -> Mapping[str, Tensor | None]:
        """`[B, T]` by name."""
        ...


def stored_accounts(
    trees: Sequence[RolloutTree],
    table: RewardTable,
    rows: TrainedRowsLike,
    credit: CreditSpec,
    speech: EncodingDialogue | None,
) -> tuple[RowAccount, ...]:
    """Returns the account of every row that a step trained on.

    Args:
        trees: all trees of the step.
        table: their rewards.
        rows: the trained rows, in the order of `rlx.batch.list_batch_rows`.
        credit: how the step placed its rewards.
        speech: decodes tokens; None shows token ids instead.

    Raises:
        RegistryError: the step was stored without its mask.
    """
    mask = rows.tokens.get("mask")
    if mask is None:
        raise RegistryError("these rollouts were recorded without their mask")
    trained = {(tree, segment) for tree, segment, *_ in rows.places}
    batch = build_token_batch(trees, without=set(table.turns) - trained)
    present = build_row_rewards(batch, trees, table).turn_present
    made = RowAccountBuilder(
        rows=batch.rows,
        groups=rows.groups,
        trees=trees,
        table=table,
        tokens=rows.tokens,
        named=place_named_rewards(batch.rows, trees, table, present, batch.turn_ids, mask, credit),
    )
    pieces = build_piece_splitter(speech)
    return tuple(made.account(number, pieces) for number in range(len(batch.rows)))
