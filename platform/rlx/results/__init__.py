"""What trained models and stored rollouts give: evaluate, probe, check, rescore and compare
runs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
