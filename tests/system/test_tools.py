"""Runs whose policy calls tools: stopped and resumed, and with the tools on an MCP server."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

from patience import find_free_port, stop_process, wait_until

from rlx.plugin import Action, ToolCall
from rlx.reward import PooledHost, RewardPool
from rlx.rollout import ToolHost
from rlx.rollout.tools import Tools

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
BRIEF = {
    "model.warm_start": "{steps: 30, batch_size: 8, learning_rate: 5e-3}",
    "rollout.prompts_per_step": 2,
    "rollout.num_generations": 2,
    "phases.0.steps": 3,
    "evaluation.problems": 2,
    "runner.checkpoint.every": 1,
    "tracking.mlflow": "null",
}


def place(home):
    """Puts the shop in experiments/ of the folder in which runs are submitted."""
    folder = home.folder / "experiments"
    shutil.copytree(EXPERIMENTS / "shop", folder / "shop", dirs_exist_ok=True)
    for name in ("shop.yaml", "shop_mcp.yaml"):
        shutil.copy(EXPERIMENTS / name, folder)


def test_a_tool_that_hangs_or_dies_costs_its_own_call():
    good = ToolCall("look_up", {"item": "pears"})
    hang, die = ToolCall("hang", {"seconds": 1e6}), ToolCall("die")
    tools = Tools(tools=[f"tool_examples:{name}" for name in ("look_up", "hang", "die")])
    with RewardPool(1, 1024) as pool:
        host = ToolHost(PooledHost(tools, pool, 20.0))
        steps = host.step([(None, Action(text="", calls=c)) for c in ((good, hang), (die, good))])
    late, dead = "error: deadline of 20 s passed", "error: process died (exit code 3)"
    assert [step.results for step in steps] == [("4", late), (dead, "4")]
    assert [step.info["failed"] for step in steps] == [1, 1]


def test_a_server_by_its_address_has_the_tools_of_one_that_is_started():
    server, port = EXPERIMENTS / "shop" / "server.py", find_free_port()
    process = subprocess.Popen([sys.executable, server, str(port)])
    try:
        wait_until("the server", lambda: answers_at(port))
        places = {"url": f"http://127.0.0.1:{port}/mcp"}, {"command": ["python", str(server)]}
        there, started = (Tools(tools=[{"mcp": place}]) for place in places)
        assert there.data() == started.data()
        assert sorted(there.data()) == ["tool calculate", "tool look_up"]
        calls = (ToolCall("calculate", {"sum": "2*3"}), ToolCall("calculate", {"sum": "2"}))
        step = there.step(None, Action(text="", calls=calls))
        assert step.results == started.step(None, Action(text="", calls=calls)).results
        assert step.results == ("6", "error: Error executing tool calculate")
    finally:
        stop_process(process)


def answers_at(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def list_results(home, run_id):
    """Turns with calls, each with the results that follow it."""
    found = []
    for _, trees, _ in home.bodies(home.run(run_id)):
        for tree in trees:
            for segment in tree["segments"]:
                if segment["author"] == "environment":
                    found.append((tree["segments"][segment["parent"]]["text"], segment["text"]))
    return found


def test_a_stopped_run_goes_on_to_the_same_numbers_and_a_server_gives_the_same_results(home):
    place(home)
    sets = {**BRIEF, **home.unhurried}
    shop, served = "experiments/shop.yaml", "experiments/shop_mcp.yaml"
    unbroken = home.submit(yaml=shop, sets=sets)
    stopped = home.submit("-d", "--again", yaml=shop, sets=sets)
    home.stop(stopped, after=1)
    assert home.rlx("resume", stopped, "-q").returncode == 0
    assert home.differences(unbroken, stopped) == []
    by_functions = dict(list_results(home, unbroken))
    by_server = dict(list_results(home, home.submit(yaml=served, sets=sets)))
    assert by_functions
    assert by_server
    common = by_functions.keys() & by_server.keys()
    right = [turn for turn in common if by_functions[turn].isdecimal()]
    assert [by_server[turn] for turn in right] == [by_functions[turn] for turn in right]
