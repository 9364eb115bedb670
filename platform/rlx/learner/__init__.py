"""The learner (DeepSpeed, prefix sharing, weight export), reference policy and critic."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
