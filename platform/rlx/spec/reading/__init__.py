"""Reads YAML into a validated `ExperimentSpec`, or reports every error with its line."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
