"""What makes another run: its experiment, seed and name, and the code of its plugins."""

BREVITY = """
from rlx.plugin import reward

@reward
def brevity(sample, *, limit: int = 5):
    return float(len(sample.text) < limit)
"""


def test_code_and_name_make_another_run_and_a_default_that_is_written_out_does_not(own):
    def edit(source):
        own.offer("[rlx.rewards]\nbrevity = rlx_brevity:brevity\n", rlx_brevity=source)

    def submit(use="{plugin: brevity, turn: answer}", **sets):
        sets = {**own.small, "rewards.turn.brevity": use, **sets}
        done = own.rlx("submit", own.yaml, "--queue", sets=sets)
        assert done.returncode == 0, done.stderr
        return done.stdout

    edit(BREVITY)
    assert "run     r-0001" in submit()
    assert "queued as r-0001" in submit("{plugin: brevity, turn: answer, limit: 5}")
    edit(BREVITY.replace("float", "0.5 * float"))
    out = submit()
    assert "run     r-0002" in out and "new     brevity changed since r-0001" in out
    assert "queued as r-0002" in submit()
    edit(BREVITY)
    assert "queued as r-0001" in submit(), "the former one is recorded already"
    out = submit(name="other")
    assert "new     r-0001 is the same experiment under the name rlcr" in out
    assert "nothing to do" in submit(name="other")
