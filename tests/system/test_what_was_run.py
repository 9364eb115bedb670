"""What makes another run: its experiment, seed and name, and the code and data of its plugins."""

import json

import pytest

BREVITY = """
from rlx.plugin import reward

@reward
def brevity(sample, *, limit: int = 5):
    return float(len(sample.text) < limit)
"""


@pytest.fixture(scope="module")
def queue(own_home):
    """Submits to the queue, with a reward of a package that the user edits."""
    home = own_home
    edit(home, BREVITY)

    def submit(**sets):
        use = {"rewards.turn.brevity": "{plugin: brevity, turn: answer}", **sets}
        done = home.rlx("submit", home.yaml, "--queue", sets={**home.small, **use})
        assert done.returncode == 0, done.stderr
        return done.stdout

    submit.home = home
    assert "r-0001" in submit()
    return submit


def edit(home, source):
    home.offer("[rlx.rewards]\nbrevity = rlx_brevity:brevity\n", rlx_brevity=source)


def test_a_default_that_is_written_out_is_the_same_experiment(queue):
    out = queue(**{"rewards.turn.brevity": "{plugin: brevity, turn: answer, limit: 5}"})
    assert "nothing to do" in out and "queued as r-0001" in out
    specs = [
        json.loads(
            queue.home.rlx(
                "validate",
                "--values",
                queue.home.yaml,
                "--json",
                f"--set=estimator.confidence={value}",
            ).stdout
        )
        for value in ("{}", "{normalize: center}", "{normalize: std}")
    ]
    digests = [spec["digest"] for spec in specs]
    assert digests[0] == digests[1] != digests[2]


def test_a_changed_plugin_makes_another_run(queue):
    edit(queue.home, BREVITY.replace("float", "0.5 * float"))
    out = queue()
    assert "run     r-0002" in out
    assert "new     brevity changed since r-0001" in out
    assert "queued as r-0002" in queue()
    edit(queue.home, BREVITY)
    assert "queued as r-0001" in queue(), "the former one is recorded already"


def test_another_name_makes_another_run(queue):
    out = queue(name="other")
    assert "new     r-0001 is the same experiment under the name rlcr" in out
    assert "nothing to do" in queue(name="other")


def test_a_group_takes_only_runs_with_the_plugins_that_are_installed(queue):
    home = queue.home
    use = {**home.small, "rewards.turn.brevity": "{plugin: brevity, turn: answer}"}
    arguments = ["submit", home.yaml, "--queue", "--group", "pair", "--seeds", "0..1"]
    first = home.rlx(*arguments, sets=use)
    assert first.returncode == 0, first.stderr
    assert "r-0001" in first.stdout
    edit(home, BREVITY + "\n# a note\n")
    again = home.rlx(*arguments, sets=use)
    assert again.returncode == 0, again.stderr
    assert "r-0001" not in again.stdout
