from .check import AuditReport, IdentityTally, check_run, probe_bodies
from .evaluation import answer_suite
from .exported_model import probe_exported
from .replay import Violation
from .report import draw_over_steps, draw_probes, draw_run_pictures
from .rescoring import RescoredStep, RescoringSummary, rescore_steps
from .run_comparison import find_run_differences

__all__ = [
    "AuditReport",
    "IdentityTally",
    "RescoredStep",
    "RescoringSummary",
    "Violation",
    "answer_suite",
    "check_run",
    "draw_over_steps",
    "draw_probes",
    "draw_run_pictures",
    "find_run_differences",
    "probe_bodies",
    "probe_exported",
    "rescore_steps",
]
