"""Evaluates a model with lm-eval or Inspect, over its OpenAI interface, and records the figures
with its run. The tool runs in an interpreter that has it: its packages need not fit those of rlx.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from rlx.errors import EnvironmentFault, SpecError
from rlx.importing import finds_module
from rlx.launch import get_registry_url, open_registry
from rlx.progress import Report, log_report
from rlx.record import Recorder, update_trackers
from rlx.results.models import OpenModel, open_served_model
from rlx.text import escape_unprintable

Tool = Literal["lm_eval", "inspect"]
TOOLS: Mapping[Tool, tuple[str, str]] = {
    "lm_eval": ("lm_eval", "'lm_eval[api]' transformers"),
    "inspect": ("inspect_ai", "inspect-ai openai scipy"),
}
"""Of each tool, its module and what to install."""
TASK_FILES = (".yaml", ".yml")
"""Endings of lm-eval's own tasks in files."""
PLACES = 1024
"""Completions that a tool may ask for at a time."""
MAX_TOKENS = 1024
"""Length of a message whose request does not limit it, in tokens."""


@dataclass(frozen=True, slots=True)
class ToolEvaluation:
    """What a tool found: of each task, `n` samples, `accuracy` (None if it has none), and each
    metric of the tool; `recorded` is the id of the run among whose records that is."""

    model: str
    tool: Tool
    figures: Mapping[str, Mapping[str, Any]]
    recorded: str | None

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "tool": self.tool, "tasks": dict(self.figures)}


def evaluate_with(
    tool_and_task: str,
    target: str,
    *,
    python: str = sys.executable,
    limit: int | None = None,
    overrides: Sequence[str] = (),
    registry: str | None = None,
    record: bool = True,
    report: Report = log_report,
) -> ToolEvaluation:
    """Serves a model to a tool that evaluates it, in the interpreter `python`.

    Args:
        tool_and_task: `lm_eval:TASK`, a name or a YAML file; or `inspect:FILE`, a Python file.
        target: as for `rlx serve`.
        limit: number of samples per task; None takes all.

    Raises:
        SpecError: there is no such tool, task's file, run, model or checkpoint.
        EnvironmentFault: the interpreter has no such tool, or the tool failed.
    """
    named, _, task = tool_and_task.partition(":")
    tool = next((known for known in TOOLS if known == named and task), None)
    if tool is None:
        raise SpecError(f"{escape_unprintable(tool_and_task)}: write lm_eval:TASK or inspect:FILE")
    is_file = tool == "inspect" or Path(task).suffix in TASK_FILES
    if is_file and not Path(task).is_file():
        raise SpecError(f"there is no file {escape_unprintable(task)}")
    module, packages = TOOLS[tool]
    try:
        is_there = finds_module(python, module)
    except OSError as error:
        raise EnvironmentFault(f"{python} cannot be started: {error.strerror}") from error
    if not is_there:
        raise EnvironmentFault(
            f"{python} has no {module}. Install it there, or in an interpreter of its own that "
            f"--python names: pip install {packages}"
        )
    url = get_registry_url(registry)
    with (
        tempfile.TemporaryDirectory(prefix="rlx-eval-") as place,
        open_served_model(target, overrides, url, MAX_TOKENS) as opened,
        _serve(opened) as (address, token),
    ):
        name, folder = opened.model.name, Path(place)
        report(f"{tool} evaluates {escape_unprintable(name)}", err=True)
        if tool == "lm_eval":
            command = _build_lm_eval_command(task, opened, address, folder)
            settings = {"OPENAI_API_KEY": token}
        else:
            command = _build_inspect_command(task, name, folder)
            paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
            settings = {"RLX_BASE_URL": address, "RLX_API_KEY": token}
            settings["PYTHONPATH"] = os.pathsep.join(paths)
        command = [python, "-m", *command, *(() if limit is None else ("--limit", str(limit)))]
        environment = {**os.environ, **settings}
        # What it prints goes to stderr, since results are printed to stdout.
        done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
        if code := done.returncode:
            raise EnvironmentFault(f"{tool} ended with exit code {code}; it says why, above")
        read = _read_lm_eval_figures if tool == "lm_eval" else _read_inspect_figures
        figures = read(folder)
        recorded = _record(opened, tool, figures, url, report) if record else None
    return ToolEvaluation(name, tool, figures, recorded)


@contextmanager
def _serve(opened: OpenModel) -> Iterator[tuple[str, str]]:
    """Serves a model on this machine until the block ends; yields the address and the token."""
    import uvicorn

    from rlx.serving import Batcher, create_app

    token = secrets.token_urlsafe(16)
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        Batcher(opened.engine, max_rows=opened.max_rows, places=PLACES) as batcher,
    ):
        app = create_app(opened.model, batcher.submit, token)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1", token
        finally:
            server.should_exit = True
            thread.join()


def _build_lm_eval_command(task: str, opened: OpenModel, address: str, folder: Path) -> list[str]:
    settings = {
        "model": opened.model.name,
        "base_url": f"{address}/completions",
        "tokenizer": opened.folder,
        "num_concurrent": 16,
    }
    arguments = ",".join(f"{key}={value}" for key, value in settings.items())
    command = ["lm_eval", "--model", "local-completions", "--tasks", task]
    return [*command, "--model_args", arguments, "--output_path", str(folder)]


def _read_lm_eval_figures(folder: Path) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("results_*.json")):
        found = json.loads(path.read_text())
        for name, metrics in found["results"].items():
            plain = {}
            for key, value in metrics.items():
                metric, _, chosen = key.partition(",")  # `acc,none`, or the filter of the answers
                if isinstance(value, int | float):
                    plain[metric if chosen in ("", "none") else f"{metric}/{chosen}"] = value
            count = (found.get("n-samples") or {}).get(name) or {}
            length = plain.pop("sample_len", 0)
            n = int(count.get("effective") or length)
            figures[name] = {"n": n, "accuracy": plain.get("acc"), **plain}
    return figures


def _build_inspect_command(task: str, name: str, folder: Path) -> list[str]:
    import rlx.evaluation

    figures_of_rlx = Path(rlx.evaluation.__file__).parent  # the task imports them from the folder
    shutil.copy(figures_of_rlx / "inspect_metric.py", folder / "rlx_inspect.py")
    shutil.copy(figures_of_rlx / "calibration.py", folder / "calibration_of_rlx.py")
    command = ["inspect_ai", "eval", task, "--display", "plain"]
    command += ["--model", f"openai-api/rlx/{name}"]
    return [*command, "--log-dir", str(folder / "logs"), "--log-format", "json"]


def _read_inspect_figures(folder: Path) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / "logs").glob("*.json")):
        log = json.loads(path.read_text())
        name = str(log["eval"]["task"])
        if log["status"] != "success":
            why = (log.get("error") or {}).get("message", log["status"])
            raise EnvironmentFault(f"inspect: {name}: {escape_unprintable(str(why))}")
        results = log["results"]
        values = {
            metric: value["value"]
            for score in results["scores"]
            for metric, value in score["metrics"].items()
        }
        accuracy = values.get("accuracy")
        figures[name] = {"n": results["completed_samples"], **values, "accuracy": accuracy}
    return figures


def _record(
    opened: OpenModel, tool: Tool, figures: Mapping[str, Any], url: str, report: Report
) -> str | None:
    run = opened.run
    if run is None:
        return None
    with open_registry(url, read_only=False) as registry:
        recorder = Recorder(registry, run.id, keep_bodies=True)
        at, label = (run.step, "after") if opened.step is None else (opened.step, "step")
        for name, own in figures.items():
            recorder.evaluation(at, label, own, {"tool": tool}, f"{tool}/{name}")
        update_trackers(registry, run, report)
    return run.id
