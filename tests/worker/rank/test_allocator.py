"""Ranks on CUDA run with the allocator that benchmarks/gpu/largest.py measures with; the user's own settings win."""

import os
import subprocess
import sys

import pytest

RANK = """
from unittest import mock
import torch
from octet.worker.common.config import RankEnv
from octet.worker.rank.main import rank_device

cuda = {"is_available": True, "device_count": 2, "get_device_capability": (9, 0)}
answers = {name: mock.Mock(return_value=found) for name, found in cuda.items()}
with mock.patch.multiple(torch.cuda, set_device=mock.DEFAULT, **answers):
    device = rank_device(RankEnv(local_rank=1, accelerator=ACCELERATOR), None)
print(device, torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.system  # each rank loads torch
@pytest.mark.parametrize(
    ("accelerator", "own", "expected"),
    [
        ("cuda", {}, "cuda:1 expandable_segments:True"),
        ("cuda", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, "cuda:1 max_split_size_mb:512"),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "cuda:1 expandable_segments:False"),
        ("cpu", {}, "cpu"),
    ],
)
def test_segments_grow_unless_the_user_sets_the_allocator(accelerator: str, own: dict[str, str], expected: str) -> None:
    """Each rank is a process, since the settings are the process's."""
    inherited = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    script = RANK.replace("ACCELERATOR", repr(accelerator))
    done = subprocess.run([sys.executable, "-c", script], env=inherited | own, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == expected, done.stderr
