"""Recomputes worked examples with rlx and compares: `python -m rlx.testing.golden FILE`.

A record names a function of rlx, its inputs and options, and the outputs that are expected:

    {"function": "credit.group_advantages", "inputs": {"scores": [1, 0], "group_ids": ["a", "a"]},
     "options": {"ddof": 0}, "outputs": {"value": [1, -1]}}

`--functions` lists the functions: estimators, masks and rewards by their YAML names, those of
installed packages included, and the public functions of the rooms that hold the mathematics.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
