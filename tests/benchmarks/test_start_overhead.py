"""The meter of CPU time counts the server and what has its token, and soon reads no other process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import start_overhead
from benchmarks.start_overhead import CpuMeter
from tests.kit.waiting import LONG_S

BUSY = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\ntime.sleep(600)"


def test_the_meter_reads_only_what_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_overhead, "_LOOKS", 1)
    token = {"TOKEN": str(tmp_path / "ray" / "token")}
    environments = {"server": {}, "rank": token, "stranger": {}}
    busy = {
        name: subprocess.Popen([sys.executable, "-c", BUSY], env=os.environ | more, stdout=subprocess.PIPE)
        for name, more in environments.items()
    }
    try:
        for process in busy.values():
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
        meter = CpuMeter(tmp_path, busy["server"].pid)
        meter._look_at_all()
        assert {pid for pid, _ in meter._used_s} == {busy["server"].pid, busy["rank"].pid}
        assert meter.used_s() >= 0.15  # twice 0.1 s, each counted in whole ticks of 10 ms
        seen: list[int] = []
        monkeypatch.setattr(meter, "_look", seen.append)
        meter._look_at_all()
        assert {busy["server"].pid, busy["rank"].pid} <= set(seen)
        assert busy["stranger"].pid not in seen
    finally:
        for process in busy.values():
            process.kill()
            process.communicate(timeout=LONG_S)
