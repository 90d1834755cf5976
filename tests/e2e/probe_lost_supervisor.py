"""Probe a supervisor before and after the death of its node, until Ray has forgotten its name.

python -m tests.e2e.probe_lost_supervisor ADDRESS TOKEN_FILE

Prints "started", reads a line, which comes once the node is dead, and prints each other answer of the launcher as JSON.
"""

import os
import sys
import time
from pathlib import Path

from octet.api_schemas import ProbeState
from octet.service.cluster.ray.calls import Start
from octet.service.cluster.ray.embedded import ray_environment
from tests.e2e.ray_nodes import LOOPBACK, POOL
from tests.kit.waiting import LONG_S

_POLL_S = 0.1


def main(address: str, token: str) -> None:
    os.environ.update(ray_environment(Path(token)) | LOOPBACK)
    import ray

    from octet.service.cluster.ray.launcher import RayLauncher
    from octet.worker.rank.supervisor import NAMESPACE, actor_name

    launcher = RayLauncher(lambda: address, (POOL,))
    start = Start(
        attempt_id="a_0123456789abcdef",
        epoch=1,
        order_json="{}",
        pool_json=POOL.model_dump_json(),
        num_workers=100 * POOL.slots,  # which are not there, so no rank starts
        num_together=1,
        warm_idle_s=0,
        node_label=POOL.node_label,
    )
    ref = start.ref
    launcher.start(start)
    _write("started")
    sys.stdin.readline()
    until, printed, is_forgotten = time.monotonic() + LONG_S, "", False
    while not is_forgotten:
        assert time.monotonic() < until, printed
        try:
            ray.get_actor(actor_name(ref), namespace=NAMESPACE)
        except ValueError:
            is_forgotten = True
        probe = launcher.probe(ref)
        if probe.state is not ProbeState.UNREACHABLE and (answer := probe.model_dump_json()) != printed:
            _write(answer)
            printed = answer
        time.sleep(_POLL_S)
    launcher.close()


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
