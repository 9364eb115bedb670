"""The world of experiments/stock.yaml: what a database answers, and what it refuses."""

import importlib
from pathlib import Path

import pytest

from rlx.plugin import Action, SessionLostError
from rlx.plugin.environment import close_sessions
from rlx.testing import check_environment

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PROBLEM = {"stock": {"figs": 4, "pears": 5}, "item": "pears", "more": 3}
TABLE = {
    "select n from stock where item='pears'": ("read", "5\n", False),
    "select item from stock where item='<plums>'": ("read", "nothing\n", False),
    "update stock set n=8 where item='pears'": ("write", "", True),
    "update stock set n=n+3 where item='pears' returning n": ("write", "", True),
    "update stock set n=8": ("write", "", False),
    "update stock set n=8 where item='plums'": ("read", "nothing\n", False),
    "update stock set item='figs'": ("refused", "SQLITE_AUTH\n", False),
    "delete from stock": ("refused", "SQLITE_AUTH\n", False),
    "attach '/tmp/other.db' as other": ("refused", "SQLITE_AUTH\n", False),
    "select zeroblob(1000000000)": ("refused", "SQLITE_ERROR\n", False),
    "select 1; select 2": ("refused", "SQLITE_MISUSE\n", False),
    "select n frm stock": ("refused", "SQLITE_ERROR\n", False),
    "\ud800": ("refused", "no SQL\n", False),
    " ": ("refused", "no SQL\n", False),
}
TABLES = [f"s{n}" for n in range(20)]
JOINED = (
    f"select 1 from {', '.join(f'stock {t}' for t in TABLES)} where {'.n + '.join(TABLES)}.n > 999"
)


@pytest.fixture
def stock(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    yield importlib.import_module("stock").Stock()
    close_sessions()


def write(sql, number=1):
    return Action(text=f"<sql>{sql}</sql>", number=number)


def test_every_promise_of_an_environment_is_kept(stock):
    check_environment(stock, [PROBLEM])


def test_statements_and_their_answers(stock):
    found = {}
    for sql in (*TABLE, JOINED):
        step = stock.step(stock.reset(PROBLEM, 0), write(sql))
        found[sql] = (step.kind, step.observation, step.info["right"])
        assert step.done == (step.kind == "write")
    assert found == {**TABLE, JOINED: ("refused", "SQLITE_INTERRUPT\n", False)}


def test_a_lost_session_is_not_replayed_and_leaves_no_file(stock):
    state = stock.reset(PROBLEM, 0)
    state = stock.step(state, write("select n from stock")).state
    close_sessions()
    with pytest.raises(SessionLostError):
        stock.step(state, write("update stock set n=8 where n=5", 2))
