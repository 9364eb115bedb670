"""The loss, as choices that do not know of each other: ratio, surrogate, aggregation; and a bonus.
The critic's is beside it.

The penalty is `rlx.kl.kl_terms` against the reference policy, a term of the token loss.

Aggregation is a weight per token, computed once for the whole optimiser step: the loss is
Σ weight · token loss over every micro-batch and rank. So the gradient is the same however the
batch is cut, and denominators are global by construction.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
