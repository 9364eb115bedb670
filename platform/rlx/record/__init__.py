"""Record runs in the SQL registry, store rollouts as Parquet, and send runs to trackers.

Input: rollouts, rewards, metrics, probes and evaluations from the training loop. Output: registry
rows, Parquet files and runs in MLflow, and functions that read the recorded values back.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
