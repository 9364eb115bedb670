"""The launcher `slurm`: each run is a Slurm job, whose supervisor starts the ranks through srun.

srun starts this module on every node, as a program. It starts the node's ranks by torchrun, which
brings those of all nodes together at the job's first node, and is their supervisor there. Slurm's
accounting is not required: `scontrol` knows running jobs, and ended ones for a while.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from rlx.descendants import adopt_orphans, kill_descendants
from rlx.errors import EnvironmentFault
from rlx.home import RunFolder
from rlx.launch.failures import write_failure_reason
from rlx.launch.launcher import JobLauncher, LauncherInput, build_torchrun_command
from rlx.launch.processes import (
    find_free_port,
    find_network_interface,
    open_temporary_folder,
    stamp_output,
)
from rlx.spec import ExperimentSpec, SlurmLauncherSpec
from rlx.text import escape_unprintable
from rlx_registry import Status

COMMAND_TIMEOUT = 30.0
"""Timeout of a Slurm command in seconds."""
RESTARTS = "SLURM_RESTART_COUNT"
"""Environment variable of a restarted job: how often Slurm has restarted it."""
UNKNOWN_JOB = "Invalid job id"
"""What Slurm says of a job that it no longer knows."""
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"})
WAITING |= {"SPECIAL_EXIT", "RESV_DEL_HOLD"}
ENDED = frozenset({"CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"})
ENDED |= {"BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"}
POLL_INTERVAL = 0.25
"""Seconds between two polls of torchrun."""
STOP_GRACE = 30.0
"""Seconds that ranks which were asked to stop have to exit after torchrun has."""


class SlurmLauncher(JobLauncher):
    """Submits each run to Slurm; its supervisor runs on the job's first node."""

    title: ClassVar[str] = "Slurm"
    reads_input: ClassVar[bool] = True

    @property
    def settings(self) -> SlurmLauncherSpec:
        assert isinstance(self.runner.launcher, SlurmLauncherSpec)
        return self.runner.launcher

    def build_command(self, folder: RunFolder, run_id: str) -> list[str]:
        nodes = self.settings.nodes
        srun = ["srun", f"--nodes={nodes}", "--ntasks-per-node=1", "--mpi=none"]
        srun += ["--kill-on-bad-exit=1", "--cpu-bind=none", "--unbuffered"]
        node = [sys.executable, "-m", "rlx.launch.slurm", str(folder.root), run_id]
        return [*srun, *node, str(self.runner.ranks // nodes), str(nodes), str(find_free_port())]

    def submit(
        self,
        spec: ExperimentSpec,
        folder: RunFolder,
        run_id: str,
        script: Path,
        environment: Mapping[str, str],
    ) -> str:
        options = _build_sbatch_options(spec, self.settings, folder, run_id)
        # A restarted job that submits another one must not pass its own count on.
        own = {name: value for name, value in environment.items() if name != RESTARTS}
        result = _run_slurm_command(["sbatch", *options, str(script)], own)
        job = result.stdout.strip().split(";")[0]
        if result.returncode or not job.isdecimal():
            refused = result.stderr.strip().removeprefix("sbatch: error: ").split("\n")[0]
            raise EnvironmentFault(f"sbatch rejected {run_id}: {escape_unprintable(refused)}")
        return job

    def cancel(self, job: str) -> None:
        result = _run_slurm_command(["scancel", job])
        if result.returncode and UNKNOWN_JOB not in result.stderr:
            raise EnvironmentFault(f"scancel {job}: {escape_unprintable(result.stderr.strip())}")

    def find_status(self, job: str, status: Status) -> tuple[Status, str] | None:
        state = _query_job_fields(job).get("JobState")
        if status == "queued" and state in ("CANCELLED", "gone"):
            return "stopped", f"job {job} was cancelled while pending in Slurm's queue"
        if status == "queued" and state in ENDED:
            why = f"job {job} ended before the run started: its Slurm state is {state}"
            return "failed", why
        if status in ("running", "lost") and state in WAITING:
            return "queued", f"Slurm requeued job {job}"
        if status == "running" and (state in ENDED or state == "gone"):
            return "lost", f"job {job} ended without recording a result: its Slurm state is {state}"
        return None

    def find_stop_status(self) -> tuple[Status, str]:
        job = os.environ["SLURM_JOB_ID"]
        if int(_query_job_fields(job).get("Restarts", 0)) > self.count_restarts():
            return "queued", f"Slurm requeued job {job}"
        why = f"Slurm ended job {job}: scancel, preemption, or its time limit; see the log"
        return "stopped", why

    def count_restarts(self) -> int:
        return int(os.environ.get(RESTARTS, 0))


def _build_sbatch_options(
    spec: ExperimentSpec, launcher: SlurmLauncherSpec, folder: RunFolder, run_id: str
) -> list[str]:
    """Options of sbatch: rlx's own, then those of the experiment."""
    log = str(folder.log).replace("%", "%%")
    ours: dict[str, str | int | bool] = {
        "parsable": True,
        "job-name": spec.name,
        "comment": f"rlx {run_id}",
        "nodes": launcher.nodes,
        "ntasks-per-node": 1,
        "chdir": str(Path.cwd()),
        "output": log,
        "open-mode": "append",
        "export": "ALL",
        "requeue": True,
    }
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in [*ours.items(), *launcher.options.items()]
        if value is not False
    ]


def _query_job_fields(job: str) -> dict[str, str]:
    """Fields of a job by Slurm's names; empty if Slurm does not answer. The state of a job that it
    no longer knows is "gone"."""
    try:
        result = _run_slurm_command(["scontrol", "--oneliner", "show", "job", job])
    except EnvironmentFault:
        return {}
    if result.returncode:
        return {"JobState": "gone"} if UNKNOWN_JOB in result.stderr else {}
    return dict(re.findall(r"(?:^|\s)(JobState|Restarts)=(\S+)", result.stdout))


def _run_slurm_command(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_TIMEOUT,
            start_new_session=True,
            env=environment,
        )
    except FileNotFoundError as error:
        needs = "`runner.launcher: slurm` needs a machine that can submit Slurm jobs"
        raise EnvironmentFault(f"{command[0]} not found: {needs}") from error
    except subprocess.TimeoutExpired as error:
        late = f"{command[0]} did not answer within {COMMAND_TIMEOUT:g} s"
        raise EnvironmentFault(late) from error


def main(folder: str, run_id: str, ranks: str, nodes: str, port: str) -> int:
    """Runs this machine's ranks until they end, or the supervisor ends them."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    adopt_orphans()
    address = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    place = [f"--nnodes={nodes}", f"--node-rank={os.environ['SLURM_NODEID']}"]
    place += ["--rdzv-backend=static", f"--master-addr={address}", f"--master-port={port}"]
    command = build_torchrun_command(place, int(ranks), Path(folder), run_id)
    paths = RunFolder(Path(folder))
    with open_temporary_folder(paths) as temporary:
        environment = {**os.environ, **temporary, "RLX_SUPERVISOR": str(os.getpid())}
        if interface := find_network_interface(address):
            # gloo uses the address of the host name, which may not resolve or may be loopback.
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        return _run_torchrun(command, environment, paths, signals)


def _run_torchrun(
    command: list[str], environment: Mapping[str, str], folder: RunFolder, signals: list[int]
) -> int:
    given, is_told = LauncherInput(), False
    torchrun = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
    )
    try:
        while torchrun.poll() is None and not given.is_closed:
            given.receive(POLL_INTERVAL)
            # Slurm signals every process of a job itself, and torchrun takes one signal only.
            if given.stop and not signals and not is_told:
                is_told = True
                torchrun.terminate()
        code = torchrun.poll()
        if code is not None and code < 0 and not (signals or is_told):
            # Before the ranks are ended, or their peers would blame the network.
            name = f"{signal.Signals(-code).name}, on {socket.gethostname()}"
            why = f"torchrun was killed by signal {-code} ({name})"
            write_failure_reason(folder, why)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(torchrun.pid, signal.SIGKILL)
        torchrun.wait()
        kill_descendants(0.0 if given.is_closed else STOP_GRACE if signals or is_told else 0.0)
    if code is None:
        return 1
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    stamp_output()
    sys.exit(main(*sys.argv[1:]))
