"""Evaluate trained models: accuracy, calibration and their plots.

Input: a model's answers to held-out problems. Output: metrics with intervals over problems or
seeds, answer scaling, selective prediction, and plots of all of them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
