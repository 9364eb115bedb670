"""A scoring pool without processes, for tests of what is scored rather than of where."""

from rlx.plugin import Score
from rlx.reward import JobOutcome


class InProcess:
    """A pool without processes; remembers its jobs."""

    def __init__(self):
        self.jobs = []

    def score(self, jobs):
        self.jobs += jobs
        return [self.run(job) for job in jobs]

    def run(self, job):
        alone = job.reward.scope == "sample"
        try:
            raw = [job.reward.score(job.samples[0])] if alone else job.reward.score(job.samples)
        except ValueError as error:
            return JobOutcome(fault=f"ValueError: {error}")
        return JobOutcome(tuple(r if r is None or isinstance(r, Score) else Score(r) for r in raw))

    @property
    def seen(self):
        return [[sample.id for sample in job.samples] for job in self.jobs]
