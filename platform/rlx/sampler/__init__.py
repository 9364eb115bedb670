"""Sampling engines. Each owns a full copy of the weights and never calls a sharded module."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
