"""Attention windows: how many tokens layers see, and how to try that they are kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlx.model.tokenizer import find_context_length

NAMES = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}
"""Names of windows in configurations, and the kind of layer that has them."""
OTHER_NAMES = ("window_size", "attention_window_size")
"""Names of windows in configurations that do not list their layers' kinds."""


def find_window(config: Any) -> int | None:
    """Returns how many tokens the narrowest layer sees, itself included; None if no dialogue can be
    longer."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)  # None: a window applies to every layer
    named = [name for name, kind in NAMES.items() if kinds is None or kind in kinds]
    widths = [getattr(config, name, None) or None for name in (*named, *OTHER_NAMES)]
    window = min((w for w in widths if isinstance(w, int)), default=None)
    return None if window is None or window >= find_context_length(config) else window


@contextmanager
def narrow_windows(model: nn.Module, width: int) -> Iterator[None]:
    """Context manager: windows of at most `width` tokens, which show in a short trial."""
    config: Any = model.config
    places = {id(x): x for x in (config, config.get_text_config(), *model.modules())}.values()
    found = [
        (place, name, value)
        for place in places
        for name in (*NAMES, *OTHER_NAMES)
        if isinstance(value := getattr(place, name, None), int) and value > width
    ]
    try:
        for place, name, _ in found:
            setattr(place, name, width)
        yield
    finally:
        for place, name, value in found:
            setattr(place, name, value)


@torch.no_grad()
def do_windows_show(model: nn.Module, width: int) -> bool:
    """Whether narrowed windows change the model's outputs, so that a trial can tell whether they
    are kept."""
    some = next(model.parameters())
    ids = torch.arange(3 * width, device=some.device)[None] % 32
    whole = model(input_ids=ids, use_cache=False)[0]
    with narrow_windows(model, width):
        return not torch.allclose(model(input_ids=ids, use_cache=False)[0], whole)


def build_attention_mask(
    config: Any,
    visible: Tensor,
    queries: Tensor,
    keys: Tensor,
    additive: torch.dtype | None = None,
) -> Tensor | dict[str, Tensor]:
    """Builds the `attention_mask` with which every layer keeps its window.

    Args:
        visible: `[R, 1, Q, K]` bool, which keys a query sees if nothing limits it.
        queries, keys: `[R, Q]` and `[R, K]` positions.
        additive: the masks' dtype, 0 where a key is seen; None for bool masks.

    Returns:
        The mask; one by kind of layer if the model has several kinds, as transformers takes them.
    """

    def finish(mask: Tensor) -> Tensor:
        return mask if additive is None else (~mask).to(additive) * torch.finfo(additive).min

    config = config.get_text_config()
    if find_window(config) is None:
        return finish(visible)
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    near = visible
    if window:
        near = visible & (queries[:, :, None] - keys[:, None, :] < window)[:, None]
    if kinds is None:
        return finish(near)
    whole = dict.fromkeys(kinds, finish(visible))
    return whole | ({"sliding_attention": finish(near)} if "sliding_attention" in whole else {})
