"""The account of stored rollouts: `rlx samples RUN --credit`."""

import pytest


@pytest.fixture(scope="module")
def told(finished):
    return finished.home.json("samples", finished.id, "--step", "4", "--credit")


def test_every_row_is_told_as_it_was_stored(finished, told):
    stored = {
        row["row"]: (tree, row)
        for step, trees, _ in finished.bodies()
        if step == 4
        for tree in trees
        for row in tree["rows"]
    }
    assert told["phase"] == "joint" and told["note"] == ""
    assert sorted(stored) == [row["row"] for row in told["rows"]]
    for row in told["rows"]:
        tree, kept = stored[row["row"]]
        own = [token for token in row["tokens"] if token["turn"] is not None]
        for key, column in (
            ("advantage", "advantages"),
            ("weight", "weights"),
            ("learns", "mask"),
            ("reward", "token_rewards"),
            ("old_logprob", "old_logprobs"),
        ):
            assert [token[key] for token in own] == kept[column]
        text = "".join(token["text"] for token in own).removesuffix("<eos>")
        assert text == tree["segments"][kept["segment"]]["text"]
        placed = [sum(token["placed"].values()) for token in own]
        assert placed == pytest.approx(kept["placed"], abs=1e-6)


def test_tables_for_people(finished):
    done = finished.home.rlx("samples", finished.id, "--step", "4", "--credit", "--row", "1")
    assert done.returncode == 0, done.stderr
    assert "step 4, phase joint" in done.stdout
    assert "\nrow 1 " in done.stdout and "advantage" in done.stdout
    assert "\nrow 0 " not in done.stdout


def test_what_is_not_there_is_said(finished):
    rlx = finished.home.rlx
    missing = rlx("samples", finished.id, "--credit", "--row", "9999")
    assert missing.returncode == 2 and "no such row" in missing.stderr
    alone = rlx("samples", finished.id, "--row", "1")
    assert alone.returncode == 2 and "add --credit" in alone.stderr
