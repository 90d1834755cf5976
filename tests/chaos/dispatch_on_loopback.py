"""`octet dispatcher` whose Ray node stays on 127.0.0.1 and takes free ports, so that several share one machine."""

import subprocess
from collections.abc import Sequence
from unittest import mock

from octet.client.cli import build_app
from octet.service.cluster.ray.embedded import start_dying_with_us
from tests.e2e.ray_nodes import ANY_PORTS


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    replaced = ["tests.e2e.join_on_loopback" if part == "octet.service.cluster.ray.command" else part for part in command]
    return start_dying_with_us([*replaced, *ANY_PORTS, "--node-manager-port=0"])


if __name__ == "__main__":
    with mock.patch("octet.service.cluster.ray.node.start_dying_with_us", _start):
        build_app()(["dispatcher"])
