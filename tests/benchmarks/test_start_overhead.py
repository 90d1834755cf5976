"""The CPU time by which the benchmark finds quiet moments is that of the server and of what has its token."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.start_overhead import cpu_s
from tests.kit.waiting import LONG_S

BUSY = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ntime.sleep(600)"


def test_the_server_and_what_has_its_token_are_counted(tmp_path: Path) -> None:
    token = {"TOKEN": str(tmp_path / "ray" / "token")}
    busy = [
        subprocess.Popen([sys.executable, "-c", BUSY], env=os.environ | more, stdout=subprocess.PIPE)
        for more in ({}, token, {})
    ]
    try:
        for process in busy:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
        server, _, stranger = (process.pid for process in busy)
        both, nobody_s = cpu_s(tmp_path, server), cpu_s(tmp_path / "other", -1)
        rank_s, strangers_s = cpu_s(tmp_path, -1), cpu_s(tmp_path / "other", stranger)
        assert nobody_s == 0
        assert min(rank_s, strangers_s) >= 0.19  # 0.2 s, counted in whole ticks of 10 ms
        assert both >= rank_s + 0.19
    finally:
        for process in busy:
            process.kill()
            process.communicate(timeout=LONG_S)
