"""What can be wrong with an experiment, by what must be known to see it.

* the spec alone: `contradictions`, `cautions`, and both in every phase (`spec`)
* its plugins: `plugin_needs`, `plugin_fit`, `plugin_advice`
* a made-up step: `trial`, `trial_turns`, and both in every phase (`rehearsal`)
* its texts and its tokenizer: `texts`
* this machine: `machine` for an experiment, `inventory` for all that `rlx check` lists

Every check yields `rlx.spec.reading.Diagnostic`s: severity, location, message, help. `experiment`
reads a file and runs the checks of spec and plugins, without importing torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
