"""Credit assignment: rewards in, token advantages out. Tensors alone; nothing here knows of
models, engines, schedules or specs beyond an estimator's own options.

An estimator takes `CreditInputs` and its options and returns `[B, T]`, or a `Credit`. It is named
in YAML, found through the entry-point group `rlx.estimators`, and imported only by a run; ours are
in `rlx.credit.estimators`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
