"""Checkpoints of a run: written, sealed against damage, read again, forked and exported.

In: what a rank needs to go on (weights, optimizer, controllers, counters). Out: a folder per step
that is complete or ignored, a new run that starts from one, and models in the Hugging Face format.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
