"""What an experiment would do to every token, shown before any model is loaded.

A few small rollouts are made up in the schedule's true shape and carried through the experiment's
own rewards, mask, placement, estimator and loss weights. The same account is given of rollouts that
a run has stored.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
