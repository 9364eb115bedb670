"""Credit assignment: rewards in, token advantages out. Tensors alone; nothing here knows of
models, engines, schedules or specs beyond an estimator's own options.

An estimator takes `CreditInputs` and its options and returns `[B, T]`, or a `Credit`. It is named
in YAML, found through the entry-point group `rlx.estimators`, and imported only by a run; ours are
in `rlx.credit.estimators`.
"""

from rlx.credit.group import group_advantages
from rlx.credit.inputs import (
    Credit,
    CreditInputs,
    spread_over_mask,
    structured_scores,
    total_scores,
)

__all__ = [
    "Credit",
    "CreditInputs",
    "group_advantages",
    "spread_over_mask",
    "structured_scores",
    "total_scores",
]
