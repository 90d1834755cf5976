"""`octet serve` on a Ray cluster that a test has started, in place of the one that it starts itself.

python -m tests.e2e.serve_on_nodes ADDRESS PORT DATA_DIR POOLS_FILE
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from octet.service.cluster.launcher import Launcher
from octet.service.cluster.ray.embedded import ray_environment, without_arrow
from octet.service.processes import embedded
from octet.service.settings import Settings

_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # see service/cluster/ray/embedded.py


def main(address: str, port: str, data_dir: str, pools_file: str) -> None:
    """Serve until SIGTERM. The cluster's token lies where the embedded Ray has its own."""

    @contextmanager
    def cluster_of_the_test(settings: Settings) -> Iterator[Launcher]:
        os.environ.update(ray_environment(settings.data_dir / "ray" / "token") | _LOOPBACK)
        without_arrow()
        from octet.service.cluster.ray.launcher import RayLauncher

        launcher = RayLauncher(lambda: address, settings.pools, warm_idle_s=settings.warm_idle_s, warms_ahead=True)
        yield launcher
        launcher.close()

    with mock.patch.object(embedded, "_local_cluster", cluster_of_the_test):
        embedded.serve(
            given={"host": "127.0.0.1", "port": int(port), "data_dir": Path(data_dir), "pools_file": Path(pools_file)}
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
