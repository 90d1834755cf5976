"""Counts on fake ranks equal what real ranks send, and predictions follow the network."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import scaling, wire_bytes
from benchmarks.gpu.networks import build_gpt
from octet.api_schemas.layout import WideDtype
from octet.api_schemas.models.gpt import gpt_sizes
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks

SMALL = gpt_sizes(64, 2, 2, 256, 32)


def real_step(rank: int, port: int, folder: Path, level: str, zero_stage: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = wire_bytes.step(SMALL, level, zero_stage)
    if rank == 0:
        sent = [[*key, num_bytes] for key, num_bytes in sorted(found.sent.items())]
        (folder / "found.json").write_text(json.dumps([sent, found.held]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.system
@pytest.mark.parametrize(("level", "zero_stage"), [("O2", 0), ("O3", 1), ("O3-split", 3)])
def test_fake_ranks_send_and_hold_what_real_ones_do(level: str, zero_stage: int, tmp_path: Path) -> None:
    run_ranks(real_step, (free_port(), tmp_path, level, zero_stage), 2)
    sent, held = json.loads((tmp_path / "found.json").read_text())
    counted = wire_bytes.count_whole(SMALL, level, zero_stage, 2)
    assert [[*key, num_bytes] for key, num_bytes in sorted(counted.sent.items())] == sent
    assert counted.held == held


@pytest.mark.system
@pytest.mark.parametrize(
    ("level", "zero_stage", "wide"), [("bf16-amp", 1, "bf16"), ("bf16-amp", 1, "fp32"), ("O3-split", 3, "fp32")]
)
def test_what_two_and_three_layers_say_of_five_in_bf16_is_what_five_say(level: str, zero_stage: int, wide: WideDtype) -> None:
    """But for the last bucket, which is filled up to a multiple that all ranks divide: here it is 1 % of what is sent."""
    sizes = SMALL.model_copy(update={"num_layers": 5})
    whole, found = (function(sizes, level, zero_stage, 8, wide) for function in (wire_bytes.count_whole, wire_bytes.count))
    assert found.num_parameters == whole.num_parameters
    assert found.held == pytest.approx(whole.held, rel=0.01)
    assert found.sent == pytest.approx(whole.sent, rel=0.01)


@pytest.mark.system
def test_a_block_keeps_more_in_bf16_and_the_cast_weights_once() -> None:
    """In a process of its own: the fake GPU stays registered for the rest of a process."""
    code = (
        "from benchmarks.scaling import kept_by_block, gpt_sizes\n"
        "sizes = gpt_sizes(256, 2, 2, 256, 128)\n"
        "bf16, te = (kept_by_block(level, sizes) for level in ('bf16-amp', 'te'))\n"
        "print(bf16.sequence / te.sequence, bf16.once / (2 * 12 * 256**2), te.once / 256**2)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    more, weights, nothing = map(float, run.stdout.split())
    assert more > 1.2
    assert weights == pytest.approx(1, rel=0.03), "weights cast to bf16"
    assert nothing < 0.1


@pytest.mark.system
def test_codes_are_a_byte_for_each_weight_of_a_converted_layer() -> None:
    sizes = SMALL.model_copy(update={"num_layers": 5})
    found = wire_bytes.count(sizes, "O2", 0, 8)
    assert found.sent["exchange", "float8_e4m3fn"] == found.sent["gather", "float8_e4m3fn"] == 5 * 12 * 64 * 64 * 7 / 8
    assert found.num_parameters == build_gpt(sizes, torch.device("meta")).num_parameters


def test_more_nodes_never_take_less_time() -> None:
    times = [scaling.exchange_s(1e9, num_ranks) for num_ranks in (2, 8, 16, 64, 512, 4096)]
    assert times == sorted(times)
    gathers = [scaling.gather_s(1e9, num_ranks) for num_ranks in (2, 8, 16, 64, 512, 4096)]
    assert gathers == sorted(gathers)
    assert scaling.exchange_s(1e9, 8) == pytest.approx(1e9 * 7 / 8 / scaling.NVLINK_BYTES_PER_S)


def test_sums_within_a_node_first_leave_an_eighth_for_the_ports() -> None:
    flat, two_levels = (scaling.exchange_s(8e9, 512, two_level=two_level) for two_level in (False, True))
    assert two_levels < flat / 3
    assert scaling.exchange_s(8e9, 8, two_level=True) == scaling.exchange_s(8e9, 8)
    assert {run.two_level for run in scaling.BASELINES} == {True}
    assert not any(run.two_level for run in scaling.RUNS if run not in scaling.BASELINES)


def test_a_pipeline_waits_for_its_chunks_and_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 stages, 8 micro-batches on each of two data parallel ranks: 8 + 3 turns; in two chunks half as long a wait."""
    monkeypatch.setattr(scaling, "chunk_s", lambda _sizes, _run, layout, _sequences, **_options: 1.0 / layout.chunks)
    monkeypatch.setattr(scaling, "head_s", lambda *_: 0.01)
    monkeypatch.setattr(scaling, "optimizer_s", lambda *_: 0.0)
    monkeypatch.setattr(scaling, "count", lambda *_: wire_bytes.Traffic(1, {("exchange", "bfloat16"): 32 * 45e9}, {}))
    run, layout = scaling.Run("te", 1), scaling.Layout(8, 4, 2, 16)
    assert scaling.large_step_s(SMALL, run, layout, 1) == pytest.approx(8 + 3 + 8 * 0.01 + 1.0)
    assert scaling.large_step_s(SMALL, run, layout, 1, hides_wire=True) == pytest.approx(8 + 3 + 8 * 0.01)
    halves = replace(layout, chunks=2)
    assert scaling.large_step_s(SMALL, run, halves, 1) == pytest.approx(8 + 1.5 + 8 * 0.01 + 1.0)


def test_a_block_in_fp8_is_faster_where_products_are_large() -> None:
    sizes = scaling.GPT_6_7B
    assert scaling.block_s(sizes, "te", 2048) < scaling.block_s(sizes, "bf16-amp", 2048)
    assert scaling.block_s(sizes, "O2", 2048, tensor=8) > scaling.block_s(sizes, "O2", 2048) / 8
