"""Plugins for rlx: rewards, and descriptors of an estimator and a mask."""
