"""An SQL registry of training runs: their status, metrics, events, evaluations and rollouts.

The package does not import rlx, and imports pyarrow only to write or read a rollout file.

    with Registry.open("sqlite:///runs.db") as registry:
        run, created = registry.submit(digest=..., seed=0, name="rlcr", ...)
        registry.add_metrics(run.id, step=1, values={"loss": 0.5})
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
