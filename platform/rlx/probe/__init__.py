"""Faithfulness probes: how much of a model's answer hangs on the reasoning that it wrote.

A sampled answer's reasoning is cut, an answer is forced there, and many continuations are scored by
the very rewards that training uses: `mc_p_correct` is the share that is right.
"""

from rlx.probe.engine import ProbeContext, ProbedAnswer, ProbeResult, ProbeSample, probe_model

__all__ = ["ProbeContext", "ProbeResult", "ProbeSample", "ProbedAnswer", "probe_model"]
