from .api import (
    Experiment,
    ExperimentPlan,
    Run,
    compare,
    list_runs,
    open_run,
    plan_experiment,
    read,
    score,
    submit,
    validate,
)
from .errors import EnvironmentFault, PluginError, RegistryError, RlxError, SpecError
from .launch import run_resume_trial
from .results import evaluate, probe_model, rescore

__version__: str

__all__ = [
    "EnvironmentFault",
    "Experiment",
    "ExperimentPlan",
    "PluginError",
    "RegistryError",
    "RlxError",
    "Run",
    "SpecError",
    "compare",
    "evaluate",
    "list_runs",
    "open_run",
    "plan_experiment",
    "probe_model",
    "read",
    "rescore",
    "run_resume_trial",
    "score",
    "submit",
    "validate",
]
