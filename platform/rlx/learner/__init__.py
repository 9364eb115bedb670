"""The learner: DeepSpeed's engine, prefix sharing, weight export; its reference and its critic."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
