"""Audit recorded runs: check their numbers, compare, rescore and evaluate them.

Input: the records of a run and its recipe. Output: identities with any violations, differences
between two runs, recomputed rewards, and evaluations and probes of exported models.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
