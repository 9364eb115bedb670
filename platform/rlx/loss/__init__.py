"""The loss, from independent choices: ratio, surrogate and aggregation, plus an entropy bonus. The
expected score of a stated confidence takes the place of its sampled credit. The value loss of the
critic is separate.

The KL penalty is `rlx.kl.kl_terms` against the reference policy, a term of the token loss.

Aggregation is a weight per token, computed once for the whole optimiser step: the loss is
Σ weight · token loss over every micro-batch and rank. The gradient is therefore the same however
the batch is split, and denominators are always global.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
