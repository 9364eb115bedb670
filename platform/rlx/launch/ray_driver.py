"""Runs a run's ranks on a Ray cluster: `python -m rlx.launch.ray_driver FOLDER RUN_ID TEMPORARY`.

The supervisor starts this process in place of torchrun. It starts or joins the cluster and follows
the ranks (`rlx.launch.ray_ranks`). Without this process, Ray ends their actors.
"""

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from rlx.errors import EnvironmentFault
from rlx.home import RunFolder
from rlx.launch.failures import convert_to_rlx_error, describe_error
from rlx.launch.leftovers import remove_temporary_folder
from rlx.launch.log_lines import stamp_output
from rlx.launch.node import write_end_reason
from rlx.launch.ray_cluster import JOINING, join_cluster, open_own_cluster
from rlx.launch.ray_head import HeadLostError
from rlx.launch.ray_launcher import list_demands
from rlx.launch.ray_orders import NotWantedError, Orders
from rlx.launch.stored_spec import load_resolved_spec
from rlx.reporting import print_to_log
from rlx.run import ProgressFile
from rlx.spec import ExperimentSpec, RayLauncherSpec
from rlx.stopwatch import Stopwatch
from rlx.text import escape_unprintable

__all__ = ["main"]


def main(folder: str, run_id: str, temporary: str) -> int:
    """Runs all ranks until they end; returns the exit code.

    Args:
        temporary: the user's folder of temporary files, in which Ray notes this machine's cluster.
    """
    paths, orders = RunFolder(Path(folder)), Orders()
    try:
        spec = load_resolved_spec(paths)
        with _open_cluster(spec, paths, temporary, orders):
            from rlx.launch.ray_ranks import run_ranks  # Ray reads the environment when imported

            orders.listen()  # again: Ray has set a handler of its own
            return run_ranks(spec, paths, run_id, orders)
    except (NotWantedError, HeadLostError):
        return 1
    except Exception as error:
        known = convert_to_rlx_error(error)
        code = 1 if known is None else known.exit_code
        write_end_reason(paths, describe_error(error), code, again=known is None)
        raise
    finally:
        if orders.is_orphan():
            remove_temporary_folder()


def _open_cluster(
    spec: ExperimentSpec, folder: RunFolder, temporary: str, orders: Orders
) -> AbstractContextManager[None]:
    launcher = spec.runner.launcher
    assert isinstance(launcher, RayLauncherSpec)
    if launcher.address != "local":
        address = "auto" if launcher.submits_jobs else launcher.address  # a job's own cluster
        absence = _Absence(address, folder, spec.runner.hang_after, orders)
        return join_cluster(address, temporary, absence.wait)
    # Whether there are GPUs, Ray finds out; there must be room for either.
    choices = (False,) if spec.runner.device == "cpu" else (False, True)
    return open_own_cluster(
        [list_demands(spec.runner, spec.sampler, on_gpus=on_gpus) for on_gpus in choices]
    )


class _Absence:
    """The time in which there is no cluster at the address of a run.

    Args:
        patience: seconds after which the run fails.
    """

    def __init__(self, address: str, folder: RunFolder, patience: float, orders: Orders) -> None:
        self._address, self._patience, self._orders = address, patience, orders
        self._progress = ProgressFile(folder.progress)
        self._waited = Stopwatch(JOINING)
        self._is_told = False

    def wait(self, why: str) -> None:
        """Has the driver go on waiting, and says so.

        Raises:
            EnvironmentFault: it has waited long enough.
            NotWantedError: the ranks are not wanted any more.
        """
        self._orders.require_start()
        if self._waited.look() >= self._patience:
            raise EnvironmentFault(
                f"no Ray cluster came back at {self._address} within {self._patience:g} s: "
                f"{escape_unprintable(why)}; once there is one, `rlx resume` continues the run"
            )
        if not self._is_told:
            self._is_told = True
            print_to_log(
                f"waiting at most {self._patience:g} s for a Ray cluster at {self._address}: "
                f"{escape_unprintable(why)}"
            )
        self._progress.show_activity("waiting for the cluster")


if __name__ == "__main__":
    stamp_output()
    sys.exit(main(*sys.argv[1:]))
