"""Compare runs: recipes by their metrics over seeds and problems, and two sides by their settings.

In: names of runs, groups, experiments or files, and the registry. Out: a `Comparison` with its
tables, or the values in which two sides differ.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
