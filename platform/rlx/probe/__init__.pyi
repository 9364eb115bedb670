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
from .statistics import (
    GRID,
    RecordedProbe,
    build_recorded_probe,
    compute_agreement,
    compute_settings_digest,
    settings_of,
)

__all__ = [
    "GRID",
    "ProbeContext",
    "ProbeResult",
    "ProbeSample",
    "ProbedAnswer",
    "RecordedProbe",
    "StateValues",
    "agreement_line",
    "build_probe_response",
    "build_recorded_probe",
    "compute_agreement",
    "compute_settings_digest",
    "draw_probe_curves",
    "draw_verbal_against_sampled",
    "probe_model",
    "settings_of",
    "state_values",
]
