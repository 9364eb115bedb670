"""How the rewards here write their examples."""

from collections.abc import Mapping
from typing import Any

from rlx.plugin import Example, Sample


def build_example(
    name: str,
    value: float | None,
    response: str = "",
    *,
    reason: str | None = None,
    options: Mapping[str, Any] | None = None,
    **sample: Any,
) -> Example:
    """An example of one turn, an answer to an empty problem unless `sample` says otherwise."""
    fields = {"id": "a", "problem": {}, "turn": "answer", "number": 1, **sample}
    return Example(
        name=name,
        sample=Sample(response=response, **fields),
        value=value,
        reason=reason,
        options=options or {},
    )
