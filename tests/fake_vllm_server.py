"""A server of a pool without vLLM, and without torch, so that it starts at once. What it answers
names the row's seed, itself and its weights.

RLX_TEST_SERVER says what else it does. `dies`: a file, below whose name it leaves one more whenever
it is killed while it generates, at most as often as the number after `:`. `refuses`: it cannot take
weights. `mute`: it ends before it starts. `killed`: as `dies`, but while it starts. `slow`: it
starts for an hour. `plain`: it takes no adapters.
"""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from safetensors import safe_open

from rlx.sampler.channel import Channel
from rlx.sampler.vllm_serving import serve

WHAT, _, HOW = os.environ.get("RLX_TEST_SERVER", "").partition("=")


class FakeServer:
    context_length, takes_adapter = 128, False

    def __init__(self, number, is_repeatable):
        self.number, self.version, self.waiting, self.total = number, None, [], 0
        self.is_repeatable = is_repeatable

    @property
    def can_begin(self):
        return not (self.is_repeatable and self.waiting)

    @property
    def is_generating(self):
        return bool(self.waiting)

    def answer(self, message, channel):
        if WHAT == "refuses":
            raise ValueError("no such layer")
        descriptor = channel.receive_file()
        with safe_open(f"/dev/fd/{descriptor}", framework="np") as weights:
            self.total = int(weights.get_tensor("mark"))
        os.close(descriptor)
        self.version = message["version"]
        return {}

    def begin(self, message, channel):
        assert self.can_begin
        self.waiting.append((channel, message["rows"]))

    def step(self):
        if WHAT == "dies":
            die(*HOW.rsplit(":", 1))
        if self.is_repeatable:
            time.sleep(0.01)  # scenario: others ask meanwhile
        waiting, self.waiting = self.waiting, []
        for channel, rows in waiting:
            said = [[seed, self.number, self.total] for _, seed in rows]
            runs = [(3, self.version)]
            yield channel, {"rows": [(tokens, [-1.0] * 3, "stop", runs) for tokens in said]}


def die(mark, most):
    deaths = list(Path(mark).parent.glob(f"{Path(mark).name}*"))
    if len(deaths) < int(most):
        Path(f"{mark}{len(deaths)}").touch()
        print("the machine has no memory left", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def main(descriptor):
    channel = Channel(Connection(descriptor))
    settings = channel.receive()
    if WHAT == "killed":
        die(*HOW.rsplit(":", 1))
    if WHAT == "slow":
        time.sleep(3600)  # scenario
    if WHAT == "mute":
        print("no device of mine")
        return 5
    if WHAT == "plain" and settings["adapter"]:
        channel.send({"error": "no adapters here"})
        return 1
    server = FakeServer(int(Path(settings["socket"]).stem), settings.get("repeatable"))
    channel.send({"longest": server.context_length})
    try:
        serve(server, channel, settings["socket"])
    except EOFError:
        return 0
    except ValueError as error:
        channel.send({"error": str(error)})
        return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
