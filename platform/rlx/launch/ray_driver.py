"""Runs a run's ranks on a Ray cluster: `python -m rlx.launch.ray_driver FOLDER RUN_ID TEMPORARY`.

The supervisor starts this process in place of torchrun. It starts or joins the cluster and follows
the ranks (`rlx.launch.ray_ranks`). Without this process, Ray ends their actors.
"""

import os
import signal
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import psutil

from rlx.home import RunFolder
from rlx.launch.failures import convert_to_rlx_error, describe_error
from rlx.launch.leftovers import remove_temporary_folder
from rlx.launch.log_lines import stamp_output
from rlx.launch.node import write_end_reason
from rlx.launch.ray_cluster import join_cluster, open_own_cluster
from rlx.launch.ray_launcher import list_demands
from rlx.launch.stored_spec import load_resolved_spec
from rlx.spec import ExperimentSpec, RayLauncherSpec

__all__ = ["main"]


def main(folder: str, run_id: str, temporary: str) -> int:
    """Runs all ranks until they end; returns the exit code.

    Args:
        temporary: the user's folder of temporary files, in which Ray notes this machine's cluster.
    """
    paths, orders = RunFolder(Path(folder)), _Orders()
    try:
        spec = load_resolved_spec(paths)
        with _open_cluster(spec, temporary):
            from rlx.launch.ray_ranks import run_ranks  # Ray reads the environment when imported

            orders.listen()  # again: Ray has set a handler of its own
            return run_ranks(spec, paths, run_id, orders)
    except Exception as error:
        known = convert_to_rlx_error(error)
        code = 1 if known is None else known.exit_code
        write_end_reason(paths, describe_error(error), code, again=known is None)
        raise
    finally:
        if orders.is_orphan():
            remove_temporary_folder(paths)


class _Orders:
    """Knows whether the ranks are to stop, and whether their supervisor is gone.

    Attributes:
        stop: the ranks should write a checkpoint and exit.
    """

    def __init__(self) -> None:
        self.stop = False
        self._supervisor: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self._supervisor = psutil.Process(int(os.environ["RLX_SUPERVISOR"]))
        self.listen()

    def listen(self) -> None:
        """Takes SIGTERM for the order to stop."""
        signal.signal(signal.SIGTERM, self._handle_signal)

    def is_orphan(self) -> bool:
        """Whether the supervisor is gone."""
        with suppress(psutil.NoSuchProcess):
            if self._supervisor is not None and self._supervisor.is_running():
                return bool(self._supervisor.status() == psutil.STATUS_ZOMBIE)
        return True

    def _handle_signal(self, *_: object) -> None:
        self.stop = True


def _open_cluster(spec: ExperimentSpec, temporary: str) -> AbstractContextManager[None]:
    launcher = spec.runner.launcher
    assert isinstance(launcher, RayLauncherSpec)
    if launcher.address != "local":
        return join_cluster(launcher.address, temporary)
    # Whether there are GPUs, Ray finds out; there must be room for either.
    choices = (False,) if spec.runner.device == "cpu" else (False, True)
    return open_own_cluster(
        [list_demands(spec.runner, spec.sampler, on_gpus=on_gpus) for on_gpus in choices]
    )


if __name__ == "__main__":
    stamp_output()
    sys.exit(main(*sys.argv[1:]))
