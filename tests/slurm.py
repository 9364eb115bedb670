"""A Slurm cluster of the tests' own, from the system's binaries: two nodes on this machine.

All of it lives in one folder: a munge daemon with a key of its own, the controller, and two node
daemons that stand for two machines. Accounting is not set up.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from patience import find_free_port, stop_process, wait_until

NODES = ("n1", "n2")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")

SETTINGS = """\
ClusterName=rlx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdTimeout=12
SlurmctldTimeout=5
KillWait=30
MinJobAge=7200
PriorityType=priority/basic
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._others = set(_step_daemons())

    def call(self, *command: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr, self.logs())
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What the controller knows of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.call("scontrol", "show", "job", job_id)))

    def idle(self) -> bool:
        """Whether both nodes wait for work."""
        return self.call("sinfo", "--noheader", "--format=%t %D") == f"idle {len(NODES)}"

    def start_requeued_job(self, job_id: str) -> None:
        """Has a requeued job start at once, which otherwise waits for two minutes."""
        wait_until("the job to wait for its time", lambda: self._is_delayed(job_id))
        self.call("scontrol", "update", f"JobId={job_id}", "StartTime=now")

    def _is_delayed(self, job_id: str) -> bool:
        job = self.job(job_id)
        return (job["JobState"], job["Reason"]) == ("PENDING", "BeginTime")

    def start(self, name: str, *command: str) -> None:
        """Starts a daemon in the foreground."""
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def start_node(self, node: str) -> None:
        """Starts a node daemon."""
        self.start(node, "slurmd", "-D", "-N", node)

    def restart_node(self, node: str, job_id: str) -> None:
        """Starts a lost node's daemon; once the node is back, a requeued job starts.

        The daemon registers twice. Whatever has been given the node when it says the second time
        that it runs no job would wait for it for ever, so the job is held until then.
        """
        self.call("scontrol", "hold", job_id)
        wait_until("all steps to end", lambda: not set(_step_daemons()) - self._others)
        self.start_node(node)
        wait_until(f"{node} to be back", self.idle)
        time.sleep(5)  # scenario
        self.call("scontrol", "update", f"JobId={job_id}", "StartTime=now")
        self.call("scontrol", "release", job_id)

    def lose_node(self, node: str) -> None:
        """Kills a node's daemon; what it has started knows nothing of that and runs on."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def logs(self) -> str:
        """The last words of all daemons."""
        return "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in self.folder.glob("*.out"))

    def end(self) -> None:
        """Ends all jobs, then all daemons."""
        with suppress(AssertionError):
            self.call("scancel", "--full", "--user=root", "--signal=KILL")
            self.call("scancel", "--user=root")
        for left in set(_step_daemons()) - self._others:
            with suppress(psutil.NoSuchProcess):
                left.kill()
        for process in reversed(self._daemons.values()):
            process.send_signal(signal.SIGTERM)
        for process in self._daemons.values():
            stop_process(process)


def _step_daemons() -> Iterator[psutil.Process]:
    """What stands between a node's daemon, which it outlives, and the processes of a job."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "slurmstepd":
            yield process


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Runs a cluster until the block ends.

    Where Slurm is missing, or we are not root, the tests that ask are skipped; with RLX_CI=1 they
    fail.
    """
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        said = "a Slurm of one's own needs root, and: apt-get install slurm-wlm munge"
        if os.environ.get("RLX_CI") == "1":
            pytest.fail(said)
        pytest.skip(said)
    # Not below pytest's folder: its path may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="rlx-slurm-") as name:
        Path(name).chmod(0o755)  # munge asks for it
        made = Cluster(Path(name))
        try:
            _start(made)
            _wait(made)
            yield made
        finally:
            made.end()


def _start(made: Cluster) -> None:
    folder = made.folder
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = [f"--{what}={folder}/munge.{what}" for what in ("socket", "pid", "seed")]
    files = [f.replace("--pid=", "--pid-file=").replace("--seed=", "--seed-file=") for f in files]
    made.start(
        "munged",
        *("munged", "--foreground", "--force", f"--key-file={key}", *files),
        *(f"--log-file={folder}/munge.log",),
    )
    ports = {name: find_free_port() for name in ("controller", "first", "second")}
    text = SETTINGS.format(host=socket.gethostname(), folder=folder, **ports)
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    for node in NODES:
        (folder / f"spool-{node}").mkdir()
    wait_until("munge's socket", (folder / "munge.socket").exists)
    made.start("slurmctld", "slurmctld", "-D")
    for node in NODES:
        made.start_node(node)


def _wait(made: Cluster) -> None:
    try:
        wait_until("both nodes to be idle", lambda: _is_idle(made))
    except AssertionError as error:
        raise AssertionError(made.logs()) from error


def _is_idle(made: Cluster) -> bool:
    with suppress(AssertionError):  # the controller does not answer yet
        return made.idle()
    return False
