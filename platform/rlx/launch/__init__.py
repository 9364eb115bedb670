"""Launches and supervises runs: everything between `rlx submit` and the training loop of a rank.

Queues a run, allocates its devices, starts its ranks (locally, by Slurm or Ray), supervises
them and handles failures.
In: a run of the registry and its folder. Out: processes that call `rlx.run`, and the run's status.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
