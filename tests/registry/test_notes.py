"""Notes and tags of runs: replaced as a whole, kept in the journal, no sign of life."""

import pytest

from rlx_registry import NotFoundError, Registry, RunNote


@pytest.fixture
def registry(url):
    with Registry.open(url) as opened:
        for seed in range(2):
            opened.submit(
                digest=f"d{seed}", seed=seed, name="n", spec={"seed": seed}, yaml="", plugins=[],
                code={}, environment={},
            )  # fmt: skip
        yield opened


def test_a_note_is_replaced_as_a_whole(registry):
    assert registry.notes.read("1") == RunNote() and registry.notes.read_all() == {}
    registry.notes.write("1", "first\n", ["b", "a", "b"])
    first = registry.notes.read("r-0001")
    assert (first.note, first.tags) == ("first\n", ("b", "a"))
    registry.notes.write("1", "", [])
    second = registry.notes.read("1")
    assert (second.note, second.tags) == ("", ()) and second.at >= first.at
    assert list(registry.notes.read_all()) == ["r-0001"]
    for call in (registry.notes.read, lambda ref: registry.notes.write(ref, "", [])):
        with pytest.raises(NotFoundError):
            call("r-0009")


def test_a_note_is_no_sign_of_life(registry):
    before = registry.run("1")
    registry.notes.write("1", "still there?", ["lost"])
    assert registry.run("1") == before


def test_the_experiment_of_every_digest_is_that_of_its_newest_run(registry):
    registry.submit(
        digest="d0", seed=7, name="n", spec={"seed": 7}, yaml="", plugins=[], code={},
        environment={},
    )  # fmt: skip
    assert registry.queries.specs() == {"d0": {"seed": 7}, "d1": {"seed": 1}}
    assert registry.queries.specs(["d1", "no"]) == {"d1": {"seed": 1}}
