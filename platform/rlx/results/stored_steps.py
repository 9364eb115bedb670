"""Reads what a run has stored of its steps: which there are, and the account of every row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx.errors import SpecError
from rlx.launch import locate_run_folder
from rlx_registry import ENDED, BodyRecord, Registry, RunRecord, read_body

if TYPE_CHECKING:
    from rlx.plan import RowAccount  # brings torch
    from rlx.spec import ExperimentSpec


@dataclass(frozen=True, slots=True)
class StepAccounts:
    """The account of every row that a step trained on, the experiment with the settings of the
    step's phase, and whether the tokens' texts are known; else they are token ids."""

    spec: "ExperimentSpec"
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
    from rlx.plan import load_phase_spec, load_run_speech, stored_accounts
    from rlx.record import read_step

    folder = locate_run_folder(run)
    spec = load_phase_spec(run.spec, str(body.statistics["phase"]))
    speech = load_run_speech(spec.model, folder.tokenizer, folder.model)
    stored = read_step(read_body(folder.root / body.path, body.sha256))
    accounts = stored_accounts(stored.trees, stored.rewards, stored.rows, spec.credit, speech)
    return StepAccounts(spec, accounts, speech is not None)
