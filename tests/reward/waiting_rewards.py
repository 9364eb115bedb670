"""Rewards that wait, for worker processes to import."""

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import ClassVar

from rlx.plugin import Reward, Sample, Score, recall

WAITED_FOR = 60.0


class Meets(Reward):
    """1 once as many calls as `company` are there at the same time; the response may misbehave."""

    concurrency: ClassVar[int] = 4

    company: int = 4

    async def score(self, sample: Sample) -> float | None:
        """Waits for the others."""
        if sample.response == "raises":
            raise LookupError("nobody there")
        if sample.response == "abstains":
            return None
        if sample.response == "hangs":
            await asyncio.sleep(WAITED_FOR)
        if sample.response == "blocks":
            time.sleep(WAITED_FOR)
        if sample.response == "dies":
            os._exit(3)
        if sample.response == "meets":
            _Meeting.present += 1
            _Meeting.most = max(_Meeting.most, _Meeting.present)
            while _Meeting.most < self.company:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.001)
            _Meeting.present -= 1
            return float(_Meeting.most)
        return float(len(sample.response))


class _Meeting:
    present = most = 0


_barrier = threading.Barrier(3)


class MeetsOnThreads(Reward):
    """1 when three calls, each on a thread of its own, have met."""

    concurrency: ClassVar[int] = 3

    def score(self, sample: Sample) -> float:
        """Waits for two others."""
        if sample.response == "hangs":
            time.sleep(WAITED_FOR)
        if sample.response == "meets":
            _barrier.wait(WAITED_FOR)
        return 1.0


class Waits(Reward):
    """An `async` reward without a concurrency."""

    async def score(self, sample: Sample) -> Score:
        """Waits for nothing much."""
        await asyncio.sleep(0)
        return Score(0.5, "waited")


class Asks(Reward):
    """What the server said: how often it was asked, which is a line in a file per question."""

    concurrency: ClassVar[int] = 8

    server: Path

    async def score(self, sample: Sample) -> Score:
        """Asks a server that counts."""

        async def ask() -> dict[str, float]:
            await asyncio.sleep(0)
            with self.server.open("a") as file:
                file.write(f"{sample.response}\n")
            if sample.response == "fails":
                raise ConnectionError("no answer")
            return {"asked": float(len(self.server.read_text().splitlines()))}

        answer = await recall({"text": sample.response}, ask)
        return Score(answer["asked"])
