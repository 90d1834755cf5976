"""Predicted memory equals real memory: fake tensors peak where real ones do, and the count equals the allocator's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.networks import BF16_AMP, FP16_AMP, O1, O2, O3_SPLIT, TE, Step, Way, gpt_step
from benchmarks.gpu.predicted_loading import load
from octet.api_schemas.models.gpt import gpt_sizes
from octet.api_schemas.models.llama import llama_sizes
from octet.worker.fp8.weight import stored
from octet.worker.planning.fake_gpu import answer_host, fake_tensors
from octet.worker.planning.live_bytes import LiveBytes
from tests.kit.waiting import LONG_S

ROOT = Path(__file__).parent.parent.parent
SMALL = gpt_sizes(64, 2, 2, 256, 32)
HOST_SCALARS = 64  # bytes: Python numbers that torch wraps in tensors of their own inside an op


@pytest.mark.system
@pytest.mark.parametrize(
    "way",
    [BF16_AMP, O3_SPLIT, *(pytest.param(way, marks=pytest.mark.matrix) for way in (FP16_AMP, TE, O1, O2))],
    ids=lambda way: way.name,
)
def test_a_step_on_fake_tensors_peaks_at_the_byte_of_a_real_one(way: Way) -> None:
    real = peak_and_rest(way, LiveBytes(granule=1))
    with fake_tensors():
        fake = peak_and_rest(way, LiveBytes(granule=1, see_within=answer_host))
    assert fake == real
    assert real[0] > real[1] > 0


def peak_and_rest(way: Way, live: LiveBytes) -> tuple[int, int]:
    """Return the peak of a second step on the CPU, and the bytes alive after it."""
    with live:
        step, _held = gpt_step(SMALL, way, 2, torch.device("cpu"), compiled=None)
        step()
        live.restart()
        step()
    return live.peak_bytes, live.num_bytes


@pytest.mark.system
@pytest.mark.parametrize(
    "level", ["O3-split-8bit", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("bf16-amp", "O2", "O2-8bit"))]
)
def test_a_model_is_read_on_fake_tensors_at_the_bytes_of_a_real_one(level: str) -> None:
    sizes, device = llama_sizes((64, 96), 2, (2, 1), 256, 32, tied=False), torch.device("cpu")
    with LiveBytes(granule=1) as live:
        real = load(sizes, level, device, live)
    with fake_tensors(), LiveBytes(granule=1, see_within=answer_host) as live:
        fake = load(sizes, level, device, live)
    assert fake == real
    assert real.held > real.weights > 0
    assert real.peak_of_weights > real.weights


def test_the_count_equals_what_the_allocator_gives() -> None:
    with LiveBytes(granule=1) as live:
        step = plain_step()
        step()
        before = live.num_bytes
        live.restart()
        step()
    step = plain_step()
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    allocated = peak = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    counted = live.peak_bytes - before
    assert counted > 100_000
    assert counted <= peak <= counted + HOST_SCALARS


def plain_step() -> Step:
    """Return a step of layers whose kernels allocate only their results on a CPU."""
    model = nn.Sequential(nn.Embedding(50, 64), nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.randint(0, 50, (32,))

    def step() -> torch.Tensor:
        loss = model(tokens).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_a_moment_is_explained_by_class_and_by_origin() -> None:
    seen = []
    with LiveBytes(granule=1) as live:
        step, (model, optimizer) = gpt_step(SMALL, O2, 2, torch.device("cpu"), compiled=None)
        step()
        with live.named(model):
            live.restart(at=(100, lambda: seen.append((live.num_bytes, live.snapshot(model, optimizer)))))
            step()
    ((num_bytes, snapshot),) = seen
    assert snapshot.by_class.total() == num_bytes
    assert snapshot.by_class["weights"] == sum(stored(parameter).untyped_storage().nbytes() for parameter in model.parameters())
    assert snapshot.by_class["activations"] > 0
    assert any("blocks.*.mlp" in origin for origin in snapshot.by_origin)


@pytest.mark.matrix
def test_the_benchmark_fills_its_table(tmp_path: Path) -> None:
    """Runs in a process of its own, because the registered device stays registered."""
    sections = ["GPT step", "Loading a model of 8 B parameters", "Vision models", "Largest GPT"]
    command = [sys.executable, "-m", "benchmarks.gpu.predicted_memory", "--smoke", "--out", str(tmp_path)]
    command += ["--sections", ",".join(sections)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-gpu-predicted-memory-smoke.md")
    text = path.read_text()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == sections
    assert "| GPT tiny, O2: peak memory |" in text
