"""Language models: the tiny ones that rlx builds, and pretrained ones.

A `Policy` is a transformers model, its tokenizer, and how it holds a dialogue.
"""

from rlx.model.build import Policy, build_policy
from rlx.model.dialogue import PlainDialogue
from rlx.model.warm_start import warm_started

__all__ = ["PlainDialogue", "Policy", "build_policy", "warm_started"]
