"""What compiled blocks launch on a Hopper GPU, counted without one: Inductor decides, told that the CPU is such a GPU."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.waiting import WHOLE_RUN_S

ROOT = Path(__file__).parent.parent.parent
NUM_LAYERS = 4
"""Linear layers of a GPT's block."""


@pytest.mark.matrix
@pytest.mark.timeout(2 * WHOLE_RUN_S)
def test_a_compiled_block_launches_what_its_layers_need() -> None:
    """In a process of its own, since this one has loaded Triton as an interpreter."""
    command = [sys.executable, "-m", "benchmarks.gpu.graph_launches", "--families", "gpt", "--levels", "O2", "delayed"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WHOLE_RUN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = []
    for total, gigabytes, by_name in re.findall(r": (\d+) launches, ([\d.]+) GB of activations\n  (\{.*\})", done.stdout):
        launches = Counter(ast.literal_eval(by_name))
        found.append((launches, float(gigabytes)))
        assert launches.total() == int(total)
        assert launches["_scaled_mm"] == 3 * NUM_LAYERS
        assert launches["kernel"] > 0
        assert sum(number for name, number in launches.items() if "attention" in name) == 2
    (current, current_gb), (delayed, delayed_gb) = found
    assert delayed_gb < current_gb  # norms and activations write codes in the pass that they make anyway
    assert current["_amax_flat"] <= NUM_LAYERS  # what attention, a product or the optimizer has written is looked through
    assert delayed["complete_kernel"] > current["complete_kernel"] == 0
