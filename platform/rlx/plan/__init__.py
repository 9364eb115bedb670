"""One look at an experiment before it runs: what is wrong with it, what it learns, what it costs.

* `checks` reads a file and reports every error in it, without importing torch; `texts` is about
  what the model is shown, `machine` about this machine.
* `trial` runs synthetic rollouts through a phase's own rewards, loss mask, placement, estimator
  and loss weights; `rehearsal_checks` does so for every phase, and says what that shows.
* `memory` estimates what a step needs.
* `row_accounts` are rows token by token, of a synthetic or a stored step; `report` collects what
  a plan shows, `tables` prints it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
