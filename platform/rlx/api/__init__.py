"""The Python interface: `import rlx`, then read, validate, plan and submit experiments, open runs.

In: files, runs and requests. Out: pandas frames and frozen results of the rooms that compute them.
Errors are those of `rlx.errors`, as on the command line.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
