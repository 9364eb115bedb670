"""Scoring: computes the named rewards of a step by plugins in killable worker processes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
