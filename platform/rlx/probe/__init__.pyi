from .engine import (
    ProbeContext,
    ProbedAnswer,
    ProbeResult,
    ProbeSample,
    StateValues,
    build_probe_response,
    probe_model,
    state_values,
)
from .pictures import (
    agreement_line,
    draw_probe_curves,
    draw_verbal_against_sampled,
)
from .questions import AssembledResponse, ProbeDialogue, build_response_tree
from .statistics import (
    GRID,
    RecordedProbe,
    build_recorded_probe,
    compute_agreement,
    compute_area_over_curve,
    compute_settings_digest,
    settings_of,
)

__all__ = [
    "GRID",
    "AssembledResponse",
    "ProbeContext",
    "ProbeDialogue",
    "ProbeResult",
    "ProbeSample",
    "ProbedAnswer",
    "RecordedProbe",
    "StateValues",
    "agreement_line",
    "build_probe_response",
    "build_recorded_probe",
    "build_response_tree",
    "compute_agreement",
    "compute_area_over_curve",
    "compute_settings_digest",
    "draw_probe_curves",
    "draw_verbal_against_sampled",
    "probe_model",
    "settings_of",
    "state_values",
]
