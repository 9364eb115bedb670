"""The note of a run in MLflow."""

import re

from rlx.cli.verb_group import VERBS
from rlx.record.mlflow_tags import TAG_LIMIT, build_run_tags
from rlx_registry import Registry


def test_a_note_names_real_commands_and_cuts_no_table(tmp_path):
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        run, _ = registry.submit(
            digest="d", seed=0, name="rlcr", spec={}, yaml="", plugins=[], code={}, environment={}
        )
        metrics = {f"metric_{n}": n / 7 for n in range(40)}
        for number in range(12):
            suite = f"suite/{number}"
            registry.results.add_evaluation(run.id, 1, "after", suite, 9, metrics)
        evaluations = registry.results.evaluations(run.id)
    note = build_run_tags(run, evaluations)["mlflow.note.content"]
    assert len(note) <= TAG_LIMIT
    verbs = re.findall(r"`rlx (\S+) r-0001`", note)
    assert verbs and set(verbs) <= set(VERBS)
    tables = [part for part in note.split("\n\n") if part.startswith("|")]
    assert 0 < len(tables) < 12
    assert {len(table.splitlines()) for table in tables} == {2 + len(metrics)}
    assert "Left out for lack of space: " in note and note.endswith("suite/11.")
