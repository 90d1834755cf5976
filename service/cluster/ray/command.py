"""The command `ray`, whose `start --block` ends when its raylet does.

    python -m octet.service.cluster.ray.command start --address=ray-head:6379 --block …

Ray's own stays: it takes a raylet that ends with 0 or SIGTERM for one that somebody stopped. A raylet ends like that when one
of its agents is killed, as the kernel does when memory is short, and its node would stay lost. This process ends
with 1, so that whoever started it, such as Docker, starts it again. It is for Linux; elsewhere it is Ray's command.
"""

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

_POLL_S = 1.0
_GRACE_S = 5.0  # if the raylet was stopped, this process ends by itself
_CHILDREN = "/proc/self/task/{thread}/children"

logger = logging.getLogger(__name__)


def main() -> None:
    """Run Ray's command with the arguments of this process."""
    from ray.scripts import scripts

    threading.Thread(target=_end_with_the_raylet, args=(threading.get_native_id(),), name="octet-raylet", daemon=True).start()
    run: Any = scripts.main  # Ray's own annotations lack it
    run()


def _end_with_the_raylet(thread: int) -> None:
    """thread: the one that starts Ray's processes."""
    while (raylet := _raylet_of(thread)) is None:
        time.sleep(_POLL_S)
    while _is_raylet(raylet):  # the list of children leaves out some while others end (proc(5)), so it is not asked again
        time.sleep(_POLL_S)
    time.sleep(_GRACE_S)
    logger.error("the raylet of this node has ended; the node ends with it")
    os._exit(1)


def _raylet_of(thread: int) -> str | None:
    """The process id of the raylet that a thread has started; None before, and where /proc does not say."""
    try:
        children = Path(_CHILDREN.format(thread=thread)).read_text().split()
    except FileNotFoundError:
        return None
    return next(filter(_is_raylet, children), None)


def _is_raylet(pid: str) -> bool:
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return name == "raylet" and rest.split()[0] != "Z"


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    main()
