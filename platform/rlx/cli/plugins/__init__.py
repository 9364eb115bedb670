"""The `rlx plugins` commands: list, show, check and create plugins.

Reads the entry points of installed distributions, or a folder or wheel that is not installed.
Prints tables, a page per plugin and the results of conformance checks; writes new distributions.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
