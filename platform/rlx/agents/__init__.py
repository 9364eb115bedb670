"""Agents that are trained as they are shipped: programs that ask the policy for their turns."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
