"""Runs the training loop of one rank.

Implements the order of a run: phases, steps, evaluation, probes, checkpoints.
In: a `PhaseSetup`, a rank and the run's folder. Out: the records of every step.
`rlx.step` is the algorithm; this package supplies its rollouts and records its results.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
