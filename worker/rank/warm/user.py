"""Ranks as a user of their tenant: the process that was forked for a rank gives up root, once its folders are that user's.

The folder of a job also belongs to the group of the data folder, where that is not root's: an api and a dispatcher of that
group send and delete what ranks write, and need not be root.

This loads no torch. The process is root until `become` returns, and has run nothing of the job before.
"""

import ctypes
import os
import pwd
from pathlib import Path

from octet.api_schemas import FailureReason, LaunchOrder
from octet.api_schemas.resources import RankUser
from octet.worker.common.errors import RankError

_PR_SET_DUMPABLE = 4
_UMASK = 0o007
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class NotThatUser(RankError):
    """The ranks cannot run as their tenant's user here."""

    reason = FailureReason.LAUNCH_FAILED


def become(order: LaunchOrder, user: RankUser) -> None:
    """Make the folders of an order the user's, for nobody else but the control plane, and run as that user from now on.

    Raises NotThatUser, with what to change, if this process is not root or the user does not reach the folders.
    """
    if os.geteuid() != 0:
        raise NotThatUser(
            f"pool {order.pool.name} runs these ranks as user {user.uid}, and Ray runs as user {os.geteuid()} on this node. "
            "Run Ray as root there, or remove tenants.….user from the pool"
        )
    groups = {Path(order.job_dir): _group_of(Path(order.job_dir).parent.parent)}
    if order.stores.prefixes and order.stores.cache_folder is not None:
        groups[Path(order.stores.cache_folder)] = None
    try:
        for folder, group in groups.items():
            give(folder, user, group)
    except OSError as error:
        raise NotThatUser(f"{error.filename or order.job_dir} cannot be made user {user.uid}'s: {error.strerror}") from error
    os.setgroups([])
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    # Linux takes /proc/self from a process that gave up root, which CUDA and NCCL need to share memory.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.umask(_UMASK)
    for folder in groups:
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise NotThatUser(
                f"user {user.uid} does not reach {folder}; let others pass through {_closed_above(folder)}: chmod o+x"
            )
    os.chdir(order.job_dir)
    os.environ.update(HOME=order.job_dir, USER=name_of(user.uid), LOGNAME=name_of(user.uid))


def _group_of(data_dir: Path) -> int | None:
    """Return the group that shares the folders of jobs. None: the data folder is root's, who needs no group, or not there."""
    return (data_dir.stat().st_gid or None) if data_dir.exists() else None


def give(folder: Path, user: RankUser, group: int | None = None) -> None:
    """Make a folder, or take one that is there, with all that is in it, and give it to the user. Raises OSError.

    group: may read and write it too, with what is written there later; never one that the user is in, as others may be.
    Links are not followed: what is in the folder may be that user's, or was another's, who may have laid them.
    """
    if not folder.parent.exists():
        above = folder.parent.parent
        folder.parent.mkdir(parents=True)
        folder.parent.chmod(0o711 if group is None else 0o771)  # others pass through, and see nothing
        if group is not None:
            os.chown(folder.parent, above.stat().st_uid, group)
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder, _FOLDER)
    is_shared = group not in {None, user.gid}
    gid = group if group is not None and is_shared else user.gid
    try:
        found = os.fstat(descriptor)
        if (found.st_uid, found.st_gid) != (user.uid, gid):
            for _, folders, files, inside in os.fwalk(dir_fd=descriptor, follow_symlinks=False):
                for name in (*folders, *files):
                    os.chown(name, user.uid, gid, dir_fd=inside, follow_symlinks=False)
            os.fchown(descriptor, user.uid, gid)  # last: until then a rank that fails here starts again
        os.fchmod(descriptor, 0o2770 if is_shared else 0o700)  # what is made in it has its group
    finally:
        os.close(descriptor)


def _closed_above(folder: Path) -> Path:
    """Return the first folder on the way to another that this user cannot pass."""
    way = [*reversed(folder.parents), folder]
    return next((each for each in way if not os.access(each, os.X_OK)), folder)


def name_of(uid: int) -> str:
    """Return the name of a user, or its number if it has none here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
