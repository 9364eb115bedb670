from .fork import copy_origin, pin_checkpoint
from .store import (
    LATEST,
    RunState,
    convert_checkpoint,
    copy_checkpoint,
    find_by_shared_hashing,
    find_newest_checkpoint,
    list_checkpoint_steps,
    load_checkpoint,
    read_state,
    write_checkpoint,
    write_weights,
)

__all__ = [
    "LATEST",
    "RunState",
    "convert_checkpoint",
    "copy_checkpoint",
    "copy_origin",
    "find_by_shared_hashing",
    "find_newest_checkpoint",
    "list_checkpoint_steps",
    "load_checkpoint",
    "pin_checkpoint",
    "read_state",
    "write_checkpoint",
    "write_weights",
]
