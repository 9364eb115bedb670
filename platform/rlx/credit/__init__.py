"""Credit assignment: from rewards to token advantages, on tensors only.

An estimator is `estimate_NAME(inputs, options)`: it takes `CreditInputs` and its options, a model
of `rlx.spec.estimator`, and returns `[B, T]` or a `Credit`. YAML names it; it is found through the
entry-point group `rlx.estimators` and imported only by a run.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
