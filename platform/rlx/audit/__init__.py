"""What a finished or stored run proves: recomputed, compared, rescored and evaluated.

In: the records of a run and its recipe. Out: identities that hold or the row that breaks them,
differences between two runs, rewards computed anew, evaluations and probes of exported models.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
