"""The training loop of one rank.

Knows the order of a run: phases, steps, prefetched rollouts, evaluation, probes and checkpoints.
In: a `Recipe`, a rank among its ranks, and the run's folder. Out: records of every step.
`rlx.step` is the algorithm; this room gives it rollouts and keeps what comes out of it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
