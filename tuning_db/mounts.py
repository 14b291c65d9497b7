"""Is a path on a network file system? SQLite's locks do not hold there, whatever the server promises."""

import os
from pathlib import Path

NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "gpfs", "9p", "fuse.sshfs"}
MOUNTS = Path("/proc/self/mounts")  # Linux; elsewhere nothing is known and nothing is warned of


def network_type(path: str | os.PathLike) -> str | None:
    """The kind of network file system that holds path or, if it is not there yet, its folder; None if it is local."""
    try:
        lines = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    where = Path(path).resolve()
    mounts = [(Path(_unescaped(point)), kind) for _, point, kind, *_ in (line.split(" ") for line in lines)]
    holding = [(len(point.parts), kind) for point, kind in mounts if where.is_relative_to(point)]
    kind = max(holding, default=(0, ""), key=lambda found: found[0])[1]
    return kind if kind in NETWORK else None


def _unescaped(point: str) -> str:
    """Blanks of mount points are written in octal."""
    return point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
