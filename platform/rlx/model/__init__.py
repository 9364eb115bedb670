"""Language models: tiny models built by rlx, and pretrained models.

A `Policy` is a transformers model with its tokenizer and dialogue format. Names are imported on
first use, so that `rlx.model.files` does not import torch.
"""

from typing import Any

import lazy_loader

from rlx.importing import speed_up_imports

_get_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    with speed_up_imports():
        return _get_name(name)
