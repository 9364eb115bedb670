"""What trained models and stored rollouts give: evaluate, probe, check, rescore and compare runs.

In: a frozen request and the URL of the registry, or the registry and a run. Out: figures, with
pictures and records on demand.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
