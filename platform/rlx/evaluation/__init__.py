"""What a trained model can do: accuracy, calibration, and their pictures.

In: answers of a model to held-out problems. Out: figures with intervals over problems or seeds,
answer scaling, selective answering, and pictures of all of them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
