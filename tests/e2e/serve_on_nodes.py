"""`octet serve` on a Ray cluster that a test has started, in place of the one that it starts itself.

python -m tests.e2e.serve_on_nodes ADDRESS PORT DATA_DIR POOLS_FILE
"""

import sys
from pathlib import Path
from unittest import mock

from service.cluster.ray.embedded import LocalRay
from service.processes.embedded import serve


def main(address: str, port: str, data_dir: str, pools_file: str) -> None:
    """Serve until SIGTERM. The cluster's token lies where the embedded Ray has its own."""
    with mock.patch.object(LocalRay, "ensure", return_value=address):
        serve(host="127.0.0.1", port=int(port), data_dir=Path(data_dir), pools_file=Path(pools_file))


if __name__ == "__main__":
    main(*sys.argv[1:])
