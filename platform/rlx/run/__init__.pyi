from .context import ControllerState, RunStopped, StopRequest
from .loop import run_experiment
from .pictures import draw_probes, draw_run_pictures
from .probes import build_probe_records, probe_problems
from .training import (
    build_probe_context,
    build_prompt_fit,
    draw_contact_problems,
    draw_held_out_problems,
)

__all__ = [
    "ControllerState",
    "RunStopped",
    "StopRequest",
    "build_probe_context",
    "build_probe_records",
    "build_prompt_fit",
    "draw_contact_problems",
    "draw_held_out_problems",
    "draw_probes",
    "draw_run_pictures",
    "probe_problems",
    "run_experiment",
]
