"""Shows what an experiment does to every token, before any model is loaded.

A plan generates a few synthetic rollouts in the shape of the schedule and runs them through the
experiment's own rewards, loss mask, reward placement, estimator and loss weights. The same report
can be built for rollouts that a run has stored.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
