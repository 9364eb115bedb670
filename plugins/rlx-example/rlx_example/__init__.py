"""Example plugins for rlx: rewards, an estimator and a mask."""
