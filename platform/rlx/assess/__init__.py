"""Assess trained models and stored rollouts: evaluate, probe and rescore them.

In: a frozen request and the URL of the registry. Out: figures, with pictures and records on demand.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
