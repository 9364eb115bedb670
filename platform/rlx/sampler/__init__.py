"""Sampling engines. Each owns whole weights of its own and never calls a sharded module."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
