"""The launcher `ray` at a Ray Jobs address: each run is a job, and its supervisor in the cluster.

It speaks the documented HTTP interface of Ray Jobs, because an import of Ray's own client takes a
second, and commands ask for the state of jobs.
"""

import http.client
import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from rlx.errors import EnvironmentFault
from rlx.home import RunFolder
from rlx.launch.launcher import JobLauncher
from rlx.launch.ray_job import JOB_DIGEST, JOB_FOLDER
from rlx.launch.ray_launcher import RayLauncher
from rlx.plugin import SamplerPlugin
from rlx.spec import ExperimentSpec, RunnerSpec
from rlx.spec.reading import Diagnostic, build_error
from rlx.text import escape_unprintable, redact_passwords, shorten_for_record
from rlx_registry import Status

__all__ = ["RayJobsLauncher", "open_ray_launcher"]

PATIENCE, LOOK = 30.0, 5.0
"""Timeouts in seconds of a request, and of one for the state of a job."""
HEADERS = "RAY_JOB_HEADERS"
"""Environment variable with headers of every request as JSON, as for Ray's own command line."""
FORWARDED = ("RLX_", "OMP_", "TOKENIZERS_", "TRANSFORMERS_VERBOSITY", "PYTHONUNBUFFERED")
"""Prefixes of the environment variables that a job gets; the rest is the cluster's own."""
SECRET = re.compile("pass|pwd|secret|token|key|credential", re.IGNORECASE)
"""Names of variables that may hold a secret."""
ENDED = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
LONGEST = 300
"""Characters of Ray's words about a job that a run keeps."""
GONE = "does not exist"
REST = 60.0
"""Seconds in which an address that did not answer is not asked for states again."""
SILENT: dict[str, float] = {}
"""When addresses have last not answered this process, by the monotonic clock."""


class RayJobsLauncher(JobLauncher, RayLauncher):
    """Submits each run to Ray Jobs; its supervisor runs where Ray starts it, by default on the
    head's node, and joins that cluster."""

    title: ClassVar[str] = "Ray Jobs"

    def check(self) -> Iterator[Diagnostic]:
        """Yields why no job can be submitted. Whether the cluster can hold the run, the job finds
        out."""
        try:
            self._request("GET", "version")
        except EnvironmentFault as fault:
            path = ("runner", "launcher", "address")
            yield build_error(path, str(fault), kind="machine")

    def count_runs_at_once(self) -> int:
        return 1

    def submit(
        self,
        spec: ExperimentSpec,
        folder: RunFolder,
        run_id: str,
        script: Path,
        environment: Mapping[str, str],
    ) -> str:
        of_run = {JOB_FOLDER: str(Path.cwd()), JOB_DIGEST: spec.digest}
        told = self._request(
            "POST",
            "jobs/",
            {
                "entrypoint": f"python -m rlx.launch.ray_job {run_id}",
                "runtime_env": {"env_vars": {**_choose_variables(environment), **of_run}},
                "metadata": {"rlx_run": run_id, "name": spec.name},
                **_name_node(self.settings.job_resources),
            },
        )
        return str(told["submission_id"])

    def cancel(self, job: str) -> None:
        self._request("POST", f"jobs/{job}/stop", missing={})

    def find_status(self, job: str, status: Status) -> tuple[Status, str] | None:
        address = self.settings.address
        is_resting = time.monotonic() - SILENT.get(address, -math.inf) < REST
        if status not in ("queued", "running") or is_resting:
            return None
        try:
            told = self._request("GET", f"jobs/{job}", missing={"status": "gone"}, timeout=LOOK)
        except EnvironmentFault:
            SILENT[address] = time.monotonic()
            return None
        state = told.get("status")
        if state not in ENDED and state != "gone":
            return None
        words = escape_unprintable(" ".join(str(told.get("message") or "").split()))
        words = shorten_for_record(words, LONGEST)
        why = f"its Ray state is {state}{': ' if words else ''}{words}"
        if status == "queued":
            if state == "STOPPED":
                return "stopped", f"job {job} was stopped before the run started"
            return "failed", f"job {job} ended before the run started: {why}"
        if status == "running":
            return "lost", f"job {job} ended without recording a result: {why}"
        return None

    def find_stop_status(self) -> tuple[Status, str]:
        return "stopped", "Ray stopped the job of the run, as in `ray job stop`; see the log"

    def _request(
        self,
        method: str,
        place: str,
        content: Mapping[str, Any] | None = None,
        missing: Mapping[str, Any] | None = None,
        timeout: float = PATIENCE,
    ) -> Mapping[str, Any]:
        """What Ray Jobs answers.

        Args:
            place: below `/api/`.
            content: is sent as JSON.
            missing: stands for the answer that there is no such job; None if that is an error.
            timeout: in seconds.

        Raises:
            EnvironmentFault: it does not answer, or refuses.
        """
        address = self.settings.address.rstrip("/")
        request = urllib.request.Request(
            f"{address}/api/{place}",
            method=method,
            data=None if content is None else json.dumps(content).encode(),
            headers={"Content-Type": "application/json", **_read_headers()},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                told: Mapping[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            lines = error.read().decode(errors="replace").strip().splitlines()
            if missing is not None and any(GONE in line for line in lines):
                return missing
            words = escape_unprintable(lines[-1] if lines else error.reason)
            raise EnvironmentFault(
                f"Ray Jobs at {address} refused: {error.code} {words}"
            ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = getattr(error, "reason", error)
            raise EnvironmentFault(f"no Ray Jobs at {address}: {why}") from error
        return told


def open_ray_launcher(runner: RunnerSpec, sampler: SamplerPlugin | None = None) -> RayLauncher:
    """The launcher for the address that the section `runner.launcher` names."""
    kind = RayJobsLauncher if runner.launcher.submits_jobs else RayLauncher
    return kind(runner, sampler)


def _choose_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What a job gets of an environment; Ray's dashboard shows it, so it has no secret."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED)
        and name != "RLX_REGISTRY"  # the cluster's own comes first
        and not SECRET.search(name)
        and redact_passwords(value) == value
    }


def _name_node(resources: Mapping[str, float]) -> dict[str, Any]:
    """What the job itself takes, which decides on which node its supervisor is."""
    rest = dict(resources)
    taken = {"entrypoint_num_cpus": rest.pop("CPU", 0), "entrypoint_num_gpus": rest.pop("GPU", 0)}
    return {name: amount for name, amount in taken.items() if amount} | (
        {"entrypoint_resources": rest} if rest else {}
    )


def _read_headers() -> dict[str, str]:
    """The headers of every request, with the cluster's token as Ray's own command line finds it.

    Raises:
        EnvironmentFault: the variable is no JSON object of texts.
    """
    try:
        own = {str(n): str(v) for n, v in json.loads(os.environ.get(HEADERS) or "{}").items()}
    except (ValueError, AttributeError) as error:
        raise EnvironmentFault(f"{HEADERS} is no JSON object: {error}") from error
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    place = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    with suppress(OSError):
        token = token or place.read_text().strip()
    return {"Authorization": f"Bearer {token}", **own} if token else own
