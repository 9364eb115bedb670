"""A model behind OpenAI's HTTP interface.

`ServedModel` turns requests into tokens and samples into messages; it knows no HTTP. `Batcher`
samples what many requests ask for together. `create_app` is the HTTP side.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
