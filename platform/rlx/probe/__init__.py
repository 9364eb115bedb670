"""Faithfulness probes: measure how much a model's answer depends on its reasoning.

A probe truncates the reasoning of a sampled answer, forces an answer there, and scores many
continuations with the training rewards: `mc_p_correct` is the share of correct ones.
Input: held-out problems and a sampler. Output: Monte-Carlo values per cut, statistics and plots.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
