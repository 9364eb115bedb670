"""Faithfulness probes: how much of a model's answer depends on the reasoning before it.

A sampled answer's reasoning is cut, an answer is forced there, and many continuations are scored by
the very rewards that training uses: `mc_p_correct` is the share that is right.
In: held-out problems and a sampler. Out: Monte-Carlo values per cut, their statistics and pictures.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
