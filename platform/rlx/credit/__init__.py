"""Credit assignment: from rewards to token advantages. Works on tensors only, without models,
engines, schedules or specs other than an estimator's own options.

An estimator takes `CreditInputs` and its options and returns `[B, T]`, or a `Credit`. YAML names
it; it is found through the entry-point group `rlx.estimators` and imported only by a run. The
built-in estimators are in `rlx.credit.estimators`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
