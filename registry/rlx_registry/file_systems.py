"""Detects network file systems, on which SQLite's write-ahead log does not work."""

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["network_file_system"]

NETWORKS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x65735546: "FUSE",
    0x01021997: "9P",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x786F4256: "VirtualBox",
}
"""Magic numbers (`statfs`) of file systems that several machines may share. FUSE may also be local;
treating it as a network file system costs some speed and keeps data safe where it is one."""


def network_file_system(folder: Path) -> str | None:
    """Returns the name of the network file system that a folder is on; None for a local one.

    Source: statfs(2) of Linux. Elsewhere every file system counts as local.
    """
    if sys.platform != "linux":
        return None
    return NETWORKS.get(get_file_system_magic(folder))


def get_file_system_magic(folder: Path) -> int:
    """The file system's magic number: the first word of `struct statfs`, 32 bits of it in use.

    Raises:
        OSError: the folder cannot be accessed.
    """
    words = (ctypes.c_long * 64)()  # 512 bytes; the structure has about 120
    library = ctypes.CDLL(None, use_errno=True)
    if library.statfs(os.fsencode(folder), words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
    return int(words[0]) & 0xFFFFFFFF
