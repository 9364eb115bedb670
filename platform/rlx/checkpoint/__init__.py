"""Write, verify, load, fork and export the checkpoints of a run.

Input: the training state of a rank (weights, optimizer, controllers, counters). Output: one folder
per step, ignored unless complete; runs that start from a checkpoint; Hugging Face models.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
