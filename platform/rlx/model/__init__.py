"""Language models: the tiny ones that rlx builds, and pretrained ones.

A `Policy` is a transformers model, its tokenizer, and how it holds a dialogue. Names are imported
when they are first used, so that `rlx.model.files` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlx.importing import speed_up_imports

if TYPE_CHECKING:
    from rlx.model.build import Policy, build_policy
    from rlx.model.dialogue import ChatDialogue, PlainDialogue
    from rlx.model.warm_start import warm_start_policy

__all__ = ["ChatDialogue", "PlainDialogue", "Policy", "build_policy", "warm_start_policy"]

_HOME = {
    "ChatDialogue": "dialogue",
    "PlainDialogue": "dialogue",
    "Policy": "build",
    "build_policy": "build",
    "warm_start_policy": "warm_start",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with speed_up_imports():
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
