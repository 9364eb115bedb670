"""Pydantic models of an experiment file. Reading a spec never imports torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
