"""TensorBoard as a tracker: one folder of event files for each run.

Every start writes a new file with the whole run and then removes the older ones, so that the files
never have two values of a step, whatever was killed or repeated. The new file begins with the mark
by which a TensorBoard that is open forgets what it has read.

TensorBoard is imported only when something is sent. It stores values in single precision.
"""

import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.home import get_rlx_home
from rlx.plugin import TrackedPoint, TrackedRun, Tracker, expand_path

if TYPE_CHECKING:
    from rlx.spec import TensorboardTrackerSpec


class TensorboardTracker(Tracker):
    """One run in TensorBoard's event files."""

    title = "TensorBoard"

    def __init__(self, settings: "TensorboardTrackerSpec") -> None:
        super().__init__(settings)
        written = settings.folder.replace("{home}", str(get_rlx_home()))
        self._root = expand_path(written).absolute()
        self.label = f"TensorBoard's files in {self._root}"
        self._folder = self._root

    def open_run(self, run: TrackedRun) -> int | None:
        """Begins a new file, with the parameters and the text of the experiment."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        from rlx.spec.reading import list_leaf_values

        self._folder = self._locate(run)
        self._folder.mkdir(parents=True, exist_ok=True)
        older = self._list_files()
        number = int(older[-1].name.split(".")[3]) + 1 if older else 1
        at = run.began or run.created
        yaml = f"```yaml\n{run.yaml}\n```"
        parameters = {
            path: value if isinstance(value, bool | int | float) else str(value)
            for path, value in list_leaf_values(run.settings)
        }
        begun = self._folder / ".begun"  # no event file, until it is whole
        begun.unlink(missing_ok=True)
        _write_events(
            begun,
            [
                Event(wall_time=at, file_version="brain.Event:2"),
                Event(wall_time=at, session_log=SessionLog(status=SessionLog.START)),
                Event(wall_time=at, summary=hparams_pb(parameters, run.id, at)),
                Event(wall_time=at, summary=text_pb("rlx/spec.yaml", yaml)),
            ],
        )
        begun.replace(self._folder / f"events.out.tfevents.{number:010d}.rlx")
        for file in older:
            file.unlink()
        return 0

    def add_points(self, points: Sequence[TrackedPoint]) -> bool:
        """Adds values to the newest file; False if there is none."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        files = self._list_files()
        if not files:
            return False
        events = []
        for point in points:
            value = Summary.Value(tag=point.name, simple_value=point.value)
            summary = Summary(value=[value])
            events.append(Event(wall_time=point.at, step=point.step, summary=summary))
        _write_events(files[-1], events)
        return True

    def finish(self, run: TrackedRun, files: Sequence[tuple[Path, str]]) -> None:
        """Adds the description and the pictures that are PNG files."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.text.summary_v2 import text_pb

        at = run.ended or time.time()
        lines = [run.description, "", *(f"- {key}: {value}" for key, value in run.tags.items())]
        events = [Event(wall_time=at, summary=text_pb("rlx/run", "\n".join(lines)))]
        for file, path in files:
            if file.suffix == ".png" and file.exists():
                events.append(Event(wall_time=at, summary=_build_picture(file, path)))
        _write_events(self._list_files()[-1], events)

    def has_run(self, run: TrackedRun) -> bool:
        """Whether there is a file of the run."""
        self._folder = self._locate(run)
        return bool(self._list_files())

    def discard(self, run: TrackedRun) -> None:
        """Deletes the run's folder."""
        folder = self._locate(run)
        if folder.exists():
            shutil.rmtree(folder)

    def find_page(self, run: TrackedRun) -> str | None:
        """Returns the command that shows the runs of the folder."""
        return f"tensorboard --logdir {self._root}"

    def _locate(self, run: TrackedRun) -> Path:
        """The run's folder, whose name tells it from runs of other registries."""
        created = time.strftime("%Y%m%d-%H%M%S", time.gmtime(run.created))
        return self._root / run.project / f"{run.name}-seed{run.seed}-{run.id}-{created}"

    def _list_files(self) -> list[Path]:
        return sorted(self._folder.glob("events.out.tfevents.*.rlx"))


def _write_events(file: Path, events: Iterable[Any]) -> None:
    """Appends events, each found by its path: another process may send the run too."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    with file.open("ab") as stream:
        writer = RecordWriter(stream)
        for event in events:
            writer.write(event.SerializeToString())


def _build_picture(file: Path, tag: str) -> Any:
    from matplotlib.image import imread
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.image.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    height, width = imread(file).shape[:2]
    content = make_tensor_proto([str(width).encode(), str(height).encode(), file.read_bytes()])
    metadata = create_summary_metadata(display_name="", description="")
    return Summary(value=[Summary.Value(tag=tag, tensor=content, metadata=metadata)])
