"""Chooses the tokenizer of a run's tiny model when it is submitted."""

from rlx.discovery import ExperimentPlugins
from rlx.errors import EnvironmentFault
from rlx.model import Vocabulary, choose_vocabulary
from rlx.spec import CLOSED_VOCABULARIES, ExperimentSpec, TinyModelSpec

__all__ = ["choose_run_vocabulary"]


def choose_run_vocabulary(spec: ExperimentSpec, plugins: ExperimentPlugins) -> Vocabulary | None:
    """Returns the tokenizer to store with a run; None if every rank knows it from the spec.

    Raises:
        EnvironmentFault: the tokenizer's folder is missing or damaged, or it is to be trained on
            data that are not on this machine.
    """
    if not isinstance(spec.model, TinyModelSpec) or spec.from_checkpoint is not None:
        return None
    try:
        chosen = choose_vocabulary(spec, plugins)
    except (OSError, ImportError) as error:
        if spec.model.tokenizer is None:
            return None  # as if it had been left out before there was a choice
        raise EnvironmentFault(
            f"model.tokenizer: it is trained on the task's texts, which are not here ({error}); "
            "submit where they are, or use `bytes`"
        ) from error
    default = Vocabulary.load_shipped(CLOSED_VOCABULARIES[0])
    implied = spec.model.tokenizer in ("bytes", *CLOSED_VOCABULARIES) or (
        spec.model.tokenizer is None and chosen.digest == default.digest
    )
    return None if implied else chosen
