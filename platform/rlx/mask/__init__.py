"""Which tokens learn: strategies over the masks that a batch names by their content.

A batch knows who wrote a token (`is_own`: the policy, as part of this row; `is_environment`), what
is the response (`is_response`), the turn (`turn_ids`) and the named spans. A strategy chooses among
them, once, for KL, advantages, loss and scores alike.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
