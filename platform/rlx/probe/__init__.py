"""Faithfulness probes: measure how much a model's answer depends on its reasoning.

A probe truncates or alters the reasoning of a sampled answer, and scores many continuations with
the training rewards: `mc_p_correct` is the share of correct ones.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
