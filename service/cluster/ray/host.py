"""The process that runs the embedded Ray and is the only one that connects to it: what a server wants arrives over a socket.

    python -m octet.service.cluster.ray.host --folder DIR --pools JSON --warm-idle-s SECONDS      (started by the keeper)

It does what `ray start --head --block` does, for which that command needs as much memory as this process with its connection.
It ends as soon as one of Ray's servers does, and Ray's servers end with it, so both are one part that may fail.
"""

import argparse
import json
import logging
import os
import socketserver
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import TypeAdapter

from octet.api_schemas import AttemptRef, PoolConfig
from octet.service.cluster.launcher import LauncherError
from octet.service.cluster.ray.calls import Start
from octet.service.cluster.ray.embedded import ADDRESS, ADDRESS_FILE, SOCKET_FILE, TEMP_DIR, without_arrow

if TYPE_CHECKING:
    from ray._private.node import Node

    from octet.service.cluster.ray.launcher import RayLauncher

_OBJECT_STORE_BYTES = 100_000_000
_WATCH_S = 0.5

logger = logging.getLogger(__name__)


def start_node(temp_dir: Path, pools: tuple[PoolConfig, ...]) -> "Node":
    """Start Ray's servers, which end with this process: the GCS, the raylet and its agents, all on loopback."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        node_ip_address=ADDRESS,
        node_name=ADDRESS,
        gcs_server_port=0,  # any free port; with Ray's fixed ranges two local clusters would collide
        min_worker_port=0,
        max_worker_port=0,
        resources={pool.slot_resource: pool.slots for pool in pools},
        labels=dict(pool.node_label for pool in pools),
        object_store_memory=_OBJECT_STORE_BYTES,
        temp_dir=str(temp_dir),
        include_dashboard=False,
        # Two processes of 1 CPU second and 90 MB each: nothing is copied to the driver, and one machine does not autoscale.
        include_log_monitor=False,  # type: ignore[arg-type]  # Ray's own annotation is wrong
        no_monitor=True,
    )
    return Node(parameters, head=True, shutdown_at_exit=True, spawn_reaper=True)


def answer(launcher: "RayLauncher", question: dict[str, Any]) -> dict[str, Any]:
    """Make a call for a server; return its value, or the error in words. Raises KeyError and TypeError for no such call."""
    arguments = question["arguments"]
    if "ref" in arguments:
        arguments["ref"] = AttemptRef.model_validate(arguments["ref"])
    calls = {
        "launch": lambda: launcher.start(Start(**arguments)),
        "probe": lambda: launcher.probe(**arguments).model_dump(mode="json"),
        "stop": lambda: launcher.stop(**arguments),
        "list": lambda: [ref.model_dump() for ref in launcher.list()],
        "resources": launcher.resources_of_nodes,
    }
    try:
        return {"value": calls[question["method"]]()}
    except LauncherError as error:
        return {"error": str(error), "retryable": error.retryable}


class Calls(socketserver.ThreadingUnixStreamServer):
    """Answers each connection in a thread of its own."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, path: Path, launcher: "RayLauncher") -> None:
        class OneCall(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                question = json.loads(self.rfile.read())
                self.wfile.write(json.dumps(answer(launcher, question)).encode())

        super().__init__(str(path), OneCall)


def host(folder: Path, pools: tuple[PoolConfig, ...], warm_idle_s: float) -> NoReturn:
    """Run Ray, and answer calls, until one of Ray's servers ends or a signal comes. `folder` is this process's own."""
    without_arrow()  # before Ray is imported, which looks for it
    from octet.service.cluster.ray.launcher import RayLauncher

    node: Any = start_node(folder / TEMP_DIR, pools)  # Ray has annotations for a part of it
    address = str(node.address)
    launcher = RayLauncher(lambda: address, pools, warm_idle_s=warm_idle_s, warms_ahead=True)
    launcher.resources_of_nodes()  # connects
    threading.Thread(target=Calls(folder / SOCKET_FILE, launcher).serve_forever, name="octet-calls", daemon=True).start()
    unfinished = folder / f"{ADDRESS_FILE}.new"
    unfinished.write_text(address)
    unfinished.rename(folder / ADDRESS_FILE)
    while not (ended := node.dead_processes()):
        time.sleep(_WATCH_S)
    logger.error("Ray ends, because these ended: %s", ", ".join(f"{name} ({process.returncode})" for name, process in ended))
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    os._exit(1)  # Ray's handlers of an exit would wait for servers that are gone


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m octet.service.cluster.ray.host")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pools", required=True)
    parser.add_argument("--warm-idle-s", type=float, required=True)
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    host(options.folder, TypeAdapter(tuple[PoolConfig, ...]).validate_json(options.pools), options.warm_idle_s)


if __name__ == "__main__":
    main()
