"""Reads what a run has stored of its steps: which there are, and the account of every row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from rlx.errors import RegistryError, SpecError
from rlx.launch import locate_run_folder
from rlx.spec import CreditSpec, ExperimentSpec
from rlx_registry import ENDED, BodyRecord, Registry, RunRecord, read_body

if TYPE_CHECKING:  # these bring torch
    from rlx.model import ModelDialogue
    from rlx.plan import RowAccount
    from rlx.record import StoredStep


@dataclass(frozen=True, slots=True)
class StepAccounts:
    """The account of every row that a step trained on, the experiment with the settings of the
    step's phase, and whether the tokens' texts are known; else they are token ids."""

    spec: ExperimentSpec
    rows: "tuple[RowAccount, ...]"
    decoded: bool


def select_rollout_steps(
    registry: Registry, run: RunRecord, requested: Sequence[int] = ()
) -> list[int]:
    """The requested steps in order, or all that are stored.

    Raises:
        SpecError: the run has stored no rollouts, or not those of a requested step.
    """
    there = registry.results.rollout_steps(run.id)
    if not there:
        why = "" if run.effective_status in ENDED else " yet"
        if run.spec.get("tracking", {}).get("rollouts") == "none":
            why = ": its spec says `tracking.rollouts: none`"
        raise SpecError(f"{run.id} has recorded no rollouts{why}")
    if missing := sorted(set(requested) - set(there)):
        whole = len(there) == there[-1] - there[0] + 1
        few = "" if whole else f", {len(there)} of them (`tracking.rollouts`)"
        raise SpecError(
            f"{run.id} has no rollouts of step {missing[0]}; it has steps {there[0]} to "
            f"{there[-1]}{few}"
        )
    return sorted(set(requested)) or list(there)


def load_step_accounts(run: RunRecord, body: BodyRecord) -> StepAccounts:
    """Loads the rewards, KL and advantages of every token of a stored step.

    Raises:
        RegistryError: the file is missing or damaged, or another version of rlx wrote it.
    """
    from rlx.model import folder_dialogue, load_local_dialogue
    from rlx.record import read_step

    folder, name = locate_run_folder(run), body.statistics["phase"]
    try:
        spec = ExperimentSpec.from_record(run.spec)
        spec = spec.resolve_phase_spec(next(p for p in spec.phases if p.name == name))
    except (ValidationError, StopIteration) as error:
        raise RegistryError(
            "this version of rlx cannot read the experiment of this run; use the version that "
            "recorded it"
        ) from error
    speech = load_local_dialogue(spec.model, folder.tokenizer)
    if speech is None and (folder.model / "config.json").is_file():
        chat = getattr(spec.model, "chat_template", False)
        speech = folder_dialogue(folder.model, chat_template=chat)
    stored = read_step(read_body(folder.root / body.path, body.sha256))
    accounts = build_stored_accounts(stored, spec.credit, speech)
    return StepAccounts(spec, accounts, speech is not None)


def build_stored_accounts(
    stored: "StoredStep", credit: CreditSpec, speech: "ModelDialogue | None"
) -> "tuple[RowAccount, ...]":
    """Returns the account of every row that a step trained on; without `speech`, the texts of its
    tokens are their ids.

    Raises:
        RegistryError: the step was stored without its mask.
    """
    from rlx.batch import build_token_batch
    from rlx.plan import build_row_accounts
    from rlx.step import join_row_rewards

    trees, table, rows = stored.trees, stored.rewards, stored.rows
    mask = rows.tokens.get("mask")
    if mask is None:
        raise RegistryError("these rollouts were recorded without their mask")
    trained = {(tree, segment) for tree, segment, *_ in rows.places}
    batch = build_token_batch(trees, without=set(table.turns) - trained)
    present = join_row_rewards(batch, trees, table, mask).rewards.turn_present
    return build_row_accounts(
        batch,
        trees,
        table,
        credit,
        speech,
        tokens=rows.tokens,
        turn_present=present,
        groups=rows.groups,
    )
