"""What is recorded of a run, and where: the SQL registry first, MLflow as its mirror.

In: rollouts, rewards, metrics, probes and evaluations as the loop makes them. Out: rows of the
registry, Parquet files of rollouts, MLflow runs, and the same values read back.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
