"""Runs on the machines of a hostfile: here, two names of this one, reached through a real sshd."""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from patience import find_free_port, stop_process, wait_until
from relaying import serve_relays

from rlx.audit.run_comparison import find_run_differences

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
ForceCommand {relay}
"""
CLIENT = """\
Host there
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  LogLevel ERROR
"""


class Ssh:
    """An sshd on a port of its own, and the configuration of an ssh that knows it as `there`."""

    def __init__(self, folder, daemon):
        self.config = folder / "client"
        self.process = subprocess.Popen(
            [daemon, "-D", "-e", "-f", str(folder / "server")], stderr=subprocess.DEVNULL
        )

    def cut(self):
        """Has every connection that is there fall silent, as a network does that is cut."""
        sessions = psutil.Process(self.process.pid).children(recursive=True)
        silent = [session for session in sessions if session.name() == "sshd"]
        for session in silent:
            session.suspend()
        return silent


def accepts_connections(process, port):
    assert process.poll() is None
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    daemon = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(daemon).exists() or os.geteuid() != 0:
        said = "an sshd of one's own needs root, and: apt-get install openssh-server"
        if os.environ.get("RLX_CI") == "1":
            pytest.fail(said)
        pytest.skip(said)
    folder = tmp_path_factory.mktemp("ssh")
    port = find_free_port()
    for name in ("host", "user"):
        making = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(making, check=True)
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}")
    (folder / "client").write_text(CLIENT.format(port=port, folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd asks for it
    with serve_relays(folder) as relay:
        (folder / "server").write_text(SERVER.format(port=port, folder=folder, relay=relay))
        running = Ssh(folder, daemon)
        wait_until("sshd to serve", lambda: accepts_connections(running.process, port))
        yield running
        stop_process(running.process)


@pytest.fixture(scope="module")
def both(ssh, own_home):
    """What makes a run one of two ranks, the second on `there`."""
    hostfile = own_home.folder / "hosts"
    hostfile.write_text("# this machine first\nlocalhost slots=1\n\nthere slots=4\n")
    launcher = f"{{kind: hosts, hostfile: {hostfile}, ssh: [-F, {ssh.config}]}}"
    return {"runner.ranks": 2, "runner.launcher": launcher}


def commands(home):
    """Every process of a home with its command line."""
    found = {}
    for pid in home.processes():
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
    return found


def one(home, *words):
    """The process whose command line holds all words."""
    held = commands(home).items()
    return next((pid for pid, command in held if all(word in command for word in words)), None)


def test_two_machines_give_the_numbers_of_one(own_home, both):
    alone = {**own_home.brief, "runner.ranks": 2}
    here = own_home.rlx("submit", own_home.yaml, "-q", sets=alone)
    there = own_home.rlx("submit", own_home.yaml, "-q", "--again", sets={**alone, **both})
    assert here.returncode == 0, here.stderr
    assert there.returncode == 0, there.stderr
    first, second = here.stdout.strip(), there.stdout.strip()
    kinds = [own_home.run(run).spec["runner"]["launcher"]["kind"] for run in (first, second)]
    assert kinds == ["local", "hosts"]
    with own_home.registry() as registry:
        assert list(find_run_differences(registry, first, second)) == []
    own_home.until(lambda: not own_home.processes(), "every process to end")


def test_whatever_ends_no_rank_is_left_and_the_run_goes_on(own_home, both, ssh):
    sets = {**own_home.long, **both, "seed": 1}
    run = own_home.rlx("submit", own_home.yaml, "-qd", sets=sets).stdout.strip()

    def trains(attempt):
        record = own_home.run(run)
        assert record.status in ("submitted", "running"), record.reason
        return record.attempt == attempt and own_home.run(run).step > max(record.step, 1)

    own_home.until(lambda: trains(1), "it to train")
    seen = commands(own_home)
    assert not [c for c in seen.values() if any("registry.db" in word for word in c)]
    silent = []

    def kill():
        os.kill(one(own_home, "torch.distributed.run", "--node-rank=1"), signal.SIGKILL)

    def cut():
        silent.extend(ssh.cut())

    for attempt, harm in enumerate((kill, cut), 2):
        harm()
        own_home.until(lambda a=attempt: own_home.run(run).attempt == a, "the next attempt")
        own_home.until(lambda a=attempt: trains(a), "it to go on")
    assert silent
    with own_home.registry() as registry:
        told = [e.message for e in registry.results.events(run) if e.kind == "attempt_failed"]
    assert "torchrun was killed by signal 9" in told[0]
    assert "ssh could not reach there, or lost the connection" in told[1]
    for session in silent:
        session.kill()

    os.kill(own_home.run(run).pid, signal.SIGKILL)
    own_home.until(lambda: not own_home.processes(), "ranks to leave without a supervisor")
    assert own_home.rlx("resume", run, "-dq").returncode == 0
    own_home.until(lambda: trains(4), "it to go on")
    assert own_home.rlx("stop", run).returncode == 0
    own_home.until(lambda: own_home.run(run).status == "stopped", "it to stop")
    stopped = own_home.run(run)
    with own_home.registry() as registry:
        assert registry.results.checkpoints(run)[-1].step == stopped.step, (
            "it wrote one last checkpoint"
        )
    own_home.until(lambda: not own_home.processes(), "every process to end")


@pytest.mark.parametrize(
    ("text", "ranks", "code", "said"),
    [
        (None, 2, 2, "No such file"),
        ("localhost slots=2\nthere 3\n", 2, 2, "a hostfile line must read NAME slots=N"),
        ("localhost slots=1\nlocalhost slots=1\n", 2, 2, "appears twice in the hostfile"),
        ("localhost slots=2\nthere slots=1\n", 4, 2, "has 3 slots"),
        ("198.51.100.7 slots=2\n", 2, 4, "is not this machine"),
        ("-oProxyCommand=false slots=2\n", 2, 2, "a hostfile line must read NAME slots=N"),
    ],
)
def test_a_hostfile_that_will_not_do(text, ranks, code, said, own_home):
    hostfile = own_home.folder / "bad"
    if text is not None:
        hostfile.write_text(text)
    launcher = f"{{kind: hosts, hostfile: {hostfile}}}"
    sets = {"runner.ranks": ranks, "runner.launcher": launcher, "seed": 9}
    done = own_home.rlx("submit", own_home.yaml, sets=sets)
    hostfile.unlink(missing_ok=True)
    assert said in done.stderr
    assert done.returncode == code


def test_a_host_that_cannot_be_reached(own_home, both, ssh):
    hostfile = own_home.folder / "unreachable"
    hostfile.write_text("localhost slots=1\nthere slots=1\n")
    launcher = f"{{kind: hosts, hostfile: {hostfile}, ssh: [-F, {ssh.config}, -p, '9']}}"
    sets = {**own_home.brief, **both, "runner.launcher": launcher}
    sets |= {"runner.max_attempts": 1, "seed": 8}
    done = own_home.rlx("submit", own_home.yaml, sets=sets)
    assert done.returncode == 4, done.stderr
    assert "ssh could not reach there" in done.stderr
