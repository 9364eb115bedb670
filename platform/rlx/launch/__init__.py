"""From `rlx submit` to the ranks of a run: everything between the verb and the training loop.

Knows how a run is queued, which devices of the machine it gets, how its ranks are started (locally,
on several hosts or by Slurm), how a supervisor watches them, and what happens when one fails.
In: a run of the registry and its folder. Out: processes that call `rlx.run`, and the run's state.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
