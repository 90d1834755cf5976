"""`ray start` for a further node that stays on 127.0.0.1.

Ray starts no second node with the setting that keeps it on loopback (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, see
service/cluster/ray/embedded.py), and without the setting it replaces 127.0.0.1 by the address of the network. Ray waits 30 s
for its raylet; this waits as long as the raylet runs, as on two cores full of ranks it needs more.
"""

import contextlib
import time
from typing import Any

import psutil
from ray._private import ray_constants, services

from octet.service.cluster.ray import command
from tests.kit.waiting import LONG_S

_POLL_S = 0.1
_ray_get_node = services.get_node


def _node_once_it_has_joined(gcs_address: str, node_id: str) -> Any:
    """Wait for the node while its raylet runs. Ray's own function raises RuntimeError for one that has not joined yet."""
    until = time.monotonic() + LONG_S
    while True:
        try:
            return _ray_get_node(gcs_address, node_id)
        except RuntimeError as error:
            if not _has_raylet():
                raise SystemExit(f"the raylet has ended before it joined: {error}") from error
            if time.monotonic() > until:
                raise
            time.sleep(_POLL_S)


def _has_raylet() -> bool:
    """Return True if the raylet that this process has started, before it asks for the node, still runs."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


if __name__ == "__main__":
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.resolve_ip_for_localhost = lambda address: address
    services.get_node = _node_once_it_has_joined
    command.main()
