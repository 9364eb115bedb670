"""Credit assignment: from rewards to token advantages. Works on tensors only, without models,
engines, schedules or specs other than an estimator's own options.

An estimator is `estimate_NAME(inputs, options)`: it takes `CreditInputs` and its options, a model
of `rlx.spec.estimator`, and returns `[B, T]` or a `Credit`. YAML names it; it is found through the
entry-point group `rlx.estimators` and imported only by a run. There is one file per family:

    grpo       grpo, dr_grpo, uniform, multiturn_grpo, mt_grpo, gigpo, tree_grpo: comparison within
               groups of rows, turns, states and trees
    outcome    gdpo, rloo, opo, gpg, maxrl, pass_at_k, remax: other baselines and scales per row
    two_level  two_level: answers, and confidences below them
    returns    gae, turn_level_gae, reinforce_plus_plus, its baseline, vineppo and
               optimal_token_baseline: along the tokens
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
