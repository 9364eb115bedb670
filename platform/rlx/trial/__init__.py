"""A made-up training step: synthetic rollouts through an experiment's own code, without a model.

The rollouts have the shape of the schedule; problems, tokens, rewards, loss mask, placement of
rewards, estimator and loss weights are the experiment's own.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
