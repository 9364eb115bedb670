"""Weights & Biases as a tracker: a run of it for each attempt, or a store for `wandb sync`.

W&B cannot change a value, and numbers the rows of a history itself. Those numbers are `seq` of the
registry, and the training step is a metric of its own, `step`. So any value may come at any time,
and W&B knows how far it has come. A resumed run may repeat steps, with other values: its offline
store is written anew, and online it is another run of W&B; the earlier one stays.

W&B is imported only when something is sent.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.plugin import TrackedPoint, TrackedRun, Tracker

if TYPE_CHECKING:
    from rlx.spec import WandbTrackerSpec

STEP = "step"
"""Name of the training step in W&B."""
INIT_SECONDS = 30
"""Seconds in which the server must answer; the sender retries."""
TAG_LIMIT = 64
"""Maximum characters of a tag in W&B."""


class WandbTracker(Tracker):
    """One run in Weights & Biases, or in its offline store in the run's folder."""

    title = "Weights & Biases"

    def __init__(self, settings: "WandbTrackerSpec") -> None:
        super().__init__(settings)
        self._is_offline = settings.mode == "offline"
        self.label = f"Weights & Biases ({settings.mode})"
        self._run: Any = None

    def open_run(self, run: TrackedRun) -> int | None:
        """Begins the offline store anew, or opens the attempt's run on the server."""
        import wandb

        self._close(0)
        if run.folder is None or not run.folder.is_dir():  # else W&B writes elsewhere
            raise FileNotFoundError(f"the run's folder {run.folder} is not there")
        if self._is_offline:
            store = run.folder / "wandb"
            if store.exists():
                shutil.rmtree(store)
            store.mkdir()
        settings = wandb.Settings(
            mode=self.settings.mode,
            root_dir=str(run.folder),
            run_id=_name_run(run),
            entity=self.settings.entity,
            project=run.project,
            run_name=f"{run.name} seed {run.seed} ({run.id})",
            run_notes=run.description,
            run_group=run.groups[0] if run.groups else None,
            run_tags=tuple(group[:TAG_LIMIT] for group in run.groups),
            resume=None if self._is_offline else "allow",
            init_timeout=INIT_SECONDS,
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        config = {**run.settings, "rlx": dict(run.tags)}
        try:
            self._run = wandb.init(config=config, settings=settings, reinit="create_new")
        except Exception:
            _end_service()  # else it takes the run for one in use when it is opened again
            raise
        self._run.define_metric("*", step_metric=STEP)
        spec = Path(self._run.dir, "spec.yaml").absolute()
        spec.write_text(run.yaml, encoding="utf-8")
        self._run.save(str(spec), base_path=str(spec.parent), policy="now")
        return self._run.starting_step - 1 if self._run.resumed else 0

    def add_points(self, points: Sequence[TrackedPoint]) -> bool:
        """Adds values, those of one step and time as one row."""
        for (step, at), group in groupby(points, lambda point: (point.step, point.at)):
            row = list(group)
            values = {point.name: point.value for point in row}
            if row[-1].seq == 0:
                self._run.summary.update(values)
                continue
            stamped = {**values, STEP: step, "_timestamp": at}
            self._run.log(stamped, step=row[-1].seq, commit=True)
        return True

    def finish(self, run: TrackedRun, files: Sequence[tuple[Path, str]]) -> None:
        """Adds files, and waits until all is stored or sent."""
        for file, _ in files:
            if file.exists():
                self._run.save(str(file), base_path=str(run.folder), policy="now")
        self._run.summary.update(
            {"rlx/status": run.status, "rlx/reason": run.tags.get("rlx.reason")}
        )
        self._close(0 if run.status == "finished" else 1)

    def has_run(self, run: TrackedRun) -> bool:
        """Whether the offline store is there; of a server, what it has confirmed."""
        stores = run.folder and run.folder.glob("wandb/offline-run-*/*.wandb")
        return not self._is_offline or any(stores or ())

    def find_page(self, run: TrackedRun) -> str | None:
        """Returns the run's page, if the entity is known, or the command that sends the store."""
        if self._is_offline:
            return f"wandb sync {run.folder}/wandb/offline-run-*"
        if self.settings.entity is None:
            return None
        server = os.environ.get("WANDB_BASE_URL", "https://wandb.ai").rstrip("/")
        return f"{server}/{self.settings.entity}/{run.project}/runs/{_name_run(run)}"

    def _close(self, exit_code: int) -> None:
        if self._run is not None:
            opened, self._run = self._run, None
            opened.finish(exit_code=exit_code)
            _end_service()  # which alone waits until all is written


def _end_service() -> None:
    """Ends W&B's process and waits for it, unless the caller has a run of its own in it."""
    import wandb

    if wandb.run is None:
        wandb.teardown()


def _name_run(run: TrackedRun) -> str:
    """An id that no other attempt has, of any registry's runs."""
    one = json.dumps([dict(run.identity), run.attempt], sort_keys=True)
    return f"{run.id}-{hashlib.sha256(one.encode()).hexdigest()[:8]}"
