"""Loss masks: strategies that select the learning tokens of a batch.

A batch describes its tokens by who wrote them (`is_own`: the policy, as part of this row;
`is_environment`), whether they are part of the response (`is_response`), their turn (`turn_ids`)
and the named spans. A strategy selects among them once, for KL, advantages, loss and scores alike.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
