"""The verbs below `rlx plugins`: list and show what is installed, check a plugin, begin one.

In: entry points of installed distributions, or a folder or wheel that is not installed.
Out: tables, a page per plugin, promises that it keeps, and a new distribution to begin with.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
