"""rlx: declarative experiments for reinforcement-learning post-training of language models.

The names below are the Python interface; `docs/python.md` shows them. Importing them is lazy:
`import rlx` brings neither torch nor pandas.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
