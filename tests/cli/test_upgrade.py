"""A home that an earlier version wrote is read, checked, rescored, compared and evaluated.

`stored/home_550b2e0.tar.xz` was written at commit 550b2e0: r-0001 finished; r-0002 was killed after
step 8 of 16, with sampling ahead, which is gone; r-0003 is r-0002's experiment unbroken. What
that version printed of them lies beside the runs. Its registry was brought from revision 0005 of
the schema to 0006. To rebuild it, run `experiments/quick.yaml`, made smaller, at that commit.
"""

import json
import re

import pytest
from homes import Home
from stored_home import unpack_home


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    """The stored home, moved to where the test runs."""
    home = Home(tmp_path_factory.mktemp("past"))
    assert unpack_home(home.folder) == home.path
    return home


def figures(home, *arguments):
    """What a command prints as JSON, without what depends on time and place."""
    return json.loads(json.dumps(home.json(*arguments)), object_hook=_timeless)


def _timeless(mapping):
    return {key: value for key, value in mapping.items() if key not in ("directory", "age")}


def keep_known(now, then):
    """What is shown now, without figures that came later; figures by suite and metric."""
    if isinstance(now, dict) and isinstance(then, dict):
        return {key: keep_known(now[key], then[key]) for key in now if key in then}
    if isinstance(now, list) and isinstance(then, list):
        if then and isinstance(then[0], dict) and "metric" in then[0]:
            by_name = {(f.get("suite"), f["metric"]): f for f in now}
            now = [by_name[f.get("suite"), f["metric"]] for f in then]
        if len(now) == len(then):
            return [keep_known(*pair) for pair in zip(now, then, strict=True)]
    return now


def test_its_figures_are_shown_as_they_were(past):
    then = json.loads((past.path / "status.json").read_text(), object_hook=_timeless)
    assert keep_known(figures(past, "status", "r-0003"), then) == then
    then = json.loads((past.path / "compare.json").read_text(), object_hook=_timeless)
    now = figures(past, "compare", "r-0001", "r-0003")
    for name in ("recipes", "spec"):
        assert keep_known(now[name], then[name]) == then[name]
    means = {(f["suite"], f["metric"], f["recipe"]): f["mean"] for f in now["figures"]}
    for one in then["figures"]:
        for label, mean in zip("AB", one["means"], strict=True):
            assert means.get((one["suite"], one["metric"], label)) == (mean and mean["mean"])


def test_every_identity_holds(past):
    done = past.rlx("check", "r-0001")
    assert done.returncode == 0, done.stdout + done.stderr
    then = (past.path / "check.txt").read_text()
    rows = [re.findall(r"^[✓✗–] .*", text, re.MULTILINE) for text in (then, done.stdout)]
    then, now = ({row.split()[1]: row.split()[:3] for row in found} for found in rows)
    gone = {"attention", "turns", "outside", "observations"}  # `masks` and the streams find these
    gone |= {"probe_scores", "rewarded", "mass", "turn_advantages", "equal_scores", "group_means"}
    assert now.keys().isdisjoint(gone)
    assert {name: now[name] for name in then.keys() - gone} == {
        name: row for name, row in then.items() if name not in gone
    }
    for name in now.keys() - then.keys():  # identities that came later check nothing that is there
        assert now[name][2] == "nothing"


def test_it_is_rescored_to_the_bit(past):
    done = past.rlx("rescore", "r-0001")
    assert done.returncode == 0, done.stderr
    assert "are bit-identical to the stored ones" in " ".join(done.stdout.split())


def test_its_model_is_evaluated(past):
    done = past.rlx("eval", "r-0001", "--json")
    assert done.returncode == 0, done.stderr


def test_a_run_of_a_feature_that_is_gone_is_not_resumed(past):
    assert past.run("r-0002").status in ("running", "lost")
    done = past.rlx("resume", "r-0002", "-q")
    assert done.returncode == 2
    assert "has rollout.off_policy_steps, which this version of rlx cannot run" in done.stderr
