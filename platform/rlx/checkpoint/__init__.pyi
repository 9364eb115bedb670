from .fork import copy_origin, pin_checkpoint
from .sealing import CheckpointError, compute_manifest_digest
from .store import (
    LATEST,
    RunState,
    convert_checkpoint,
    copy_checkpoint,
    find_newest_checkpoint,
    load_checkpoint,
    read_in_flight_bytes,
    read_state,
    write_checkpoint,
)
from .weights import write_weights

__all__ = [
    "LATEST",
    "CheckpointError",
    "RunState",
    "compute_manifest_digest",
    "convert_checkpoint",
    "copy_checkpoint",
    "copy_origin",
    "find_newest_checkpoint",
    "load_checkpoint",
    "pin_checkpoint",
    "read_in_flight_bytes",
    "read_state",
    "write_checkpoint",
    "write_weights",
]
