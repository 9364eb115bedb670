"""Promises that plugin authors can check their own work against."""

from rlx.testing.estimators import check_estimator, example_inputs

__all__ = ["check_estimator", "example_inputs"]
