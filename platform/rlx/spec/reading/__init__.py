"""Reads YAML into a validated `ExperimentSpec` and reports every error with its line.

Covers YAML parsing, source locations of keys, `key=value` overrides, and the translation of
Pydantic errors for authors of YAML. Input: files and overrides. Output: a spec or diagnostics.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
