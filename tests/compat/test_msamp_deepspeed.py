"""`from msamp import deepspeed`: DeepSpeed's engine with the configuration of MS-AMP's examples, on one rank and on two."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from octet.compat.msamp import __main__ as runner
from octet.compat.msamp import deepspeed
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.kit.waiting import LONG_S

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).parent / "scripts" / "cifar10.py")
CONFIG: dict[str, Any] = {
    "train_batch_size": 32,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.002, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.002, "warmup_num_steps": 10, "warmup_type": "linear"}},
    "fp16": {"enabled": True, "loss_scale": 0},
    "msamp": {"enabled": True, "opt_level": "O3"},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
}
WIDE = {key: value for key, value in CONFIG.items() if key not in ("fp16", "msamp", "scheduler")} | {"train_batch_size": 16}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Leave no process group behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


def values_of(engine: deepspeed.Engine) -> torch.Tensor:
    return torch.cat([value.float().flatten() for value in engine.module.state_dict().values()])


def train(engine: deepspeed.Engine, batches: list[torch.Tensor]) -> None:
    for batch in batches:
        engine.backward(engine(batch).square().mean())
        engine.step()


@pytest.mark.system
def test_its_cifar10_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.setattr(sys, "argv", [])
    config = ["--deepspeed", "--deepspeed_config", str(tmp_path / "ds_config.json")]
    try:
        runner.main([PROGRAM, *config, "--save", str(tmp_path / "saved")])
    finally:
        for name in ("msamp", "digits"):
            sys.modules.pop(name, None)
    words = capsys.readouterr().out.split()
    said = dict(pairwise(words))
    assert (said["level"], said["codes"], said["steps"]) == ("O3", "torch.float8_e4m3fn", "48")
    assert float(said["accuracy"]) > 0.9
    assert float(said["lr"]) == 0.002
    assert (tmp_path / "saved" / "step_0000000048").is_dir()


def test_the_engine_steps_at_the_boundary_and_resumes_to_the_bit(tmp_path: Path) -> None:
    config = CONFIG | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    batches = list(torch.randn(8, 4, 32))
    engine, optimizer, loader, schedule = deepspeed.initialize(model=network(), config=config)
    assert loader is None
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (2, 8)
    before = values_of(engine)
    train(engine, batches[:1])
    assert torch.equal(values_of(engine), before)
    assert engine.get_global_grad_norm() is None
    train(engine, batches[1:4])
    assert not torch.equal(values_of(engine), before)
    assert engine.global_steps == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002 * 3 / 10)
    assert schedule.get_last_lr() == engine.get_lr()
    assert engine.get_global_grad_norm() > 0
    engine.save_checkpoint(str(tmp_path), "tag", {"epoch": 3})
    train(engine, batches[4:])

    resumed, *_ = deepspeed.initialize(model=network(), config=config)
    assert resumed.load_checkpoint(str(tmp_path), "none") == (None, {})
    folder, client_state = resumed.load_checkpoint(str(tmp_path), "tag")
    assert folder == str(tmp_path / "tag")
    assert client_state == {"epoch": 3}
    train(resumed, batches[4:])
    assert torch.equal(values_of(resumed), values_of(engine))
    assert resumed.get_lr() == engine.get_lr()


def test_settings_that_matter_and_are_not_applied_are_warnings() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_min_lr": 0.001, "warmup_type": "linear"}}
    with pytest.warns(UserWarning, match=r"not applied: scheduler\.params\.warmup_min_lr: 0.001"):
        deepspeed.initialize(model=network(), config=CONFIG | {"scheduler": scheduler})


def test_the_logarithmic_warmup_is_deepspeeds() -> None:
    """min(1, log(k + 1) / log(10)) after k steps of its scheduler, which is one behind; WarmupLR in DeepSpeed 0.19."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.002, "warmup_num_steps": 10}}
    engine, *_ = deepspeed.initialize(model=network(), config=CONFIG | {"scheduler": scheduler})
    rates = []
    for batch in torch.randn(13, 4, 32):
        rates += engine.get_lr()
        train(engine, [batch])
    logs = [0.0, *(math.log(step) / math.log(10) for step in range(1, 11)), 1.0, 1.0]
    assert rates == pytest.approx([0.002 * factor for factor in logs])


@pytest.mark.filterwarnings("ignore:.*script_method")  # torch warns when it loads its compiler
def test_offload_and_compilation_are_applied_where_one_rank_trains() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = CONFIG | {"zero_optimization": zero, "compile": {"enabled": True}, "msamp": {"enabled": True, "opt_level": "O2"}}
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)))
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
    assert optimizer.host_states is not None
    assert [block._compiled_call_impl is not None for block in engine.module] == [True, True, True]


def test_what_it_needs_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"model is None; allowed: a torch\.nn\.Module"):
        deepspeed.initialize(config=CONFIG)
    with pytest.raises(ValueError, match=r"there is no configuration; allowed: config, or args\.deepspeed_config"):
        deepspeed.initialize(SimpleNamespace(), network())
    with pytest.raises(ValueError, match="the configuration has no batch; allowed: train_batch_size"):
        deepspeed.initialize(model=network(), config={key: CONFIG[key] for key in CONFIG if key != "train_batch_size"})
    with pytest.raises(ValueError, match="the configuration has no optimizer that octet has"):
        deepspeed.initialize(model=network(), config={"train_batch_size": 8})


def in_ranks(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(1)
    steps = torch.randn(3, 2, 8, 32)[:, rank]
    found = {}
    for stage in (0, 2):
        zero = {"zero_optimization": {"stage": stage}}
        for micro in (8, 4):
            engine, *_ = deepspeed.initialize(model=network(), config=WIDE | zero | {"train_micro_batch_size_per_gpu": micro})
            train(engine, [batch for step in steps for batch in step.split(micro)])
            found[stage, micro] = values_of(engine)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.system
def test_two_ranks_accumulate_what_one_pass_computes(tmp_path: Path) -> None:
    run_ranks(in_ranks, (free_port(), str(tmp_path)), 2)
    first, second = saved_by_ranks(tmp_path, 2)
    alone, _, *_ = deepspeed.initialize(model=network(), config=WIDE)
    torch.manual_seed(1)
    train(alone, [step.reshape(16, 32) for step in torch.randn(3, 2, 8, 32)])
    for key, values in first.items():
        assert torch.equal(values, second[key]), key
        assert torch.allclose(values, values_of(alone), rtol=0, atol=2e-5), key
    assert not torch.allclose(first[0, 8], values_of(deepspeed.initialize(model=network(), config=WIDE)[0]), atol=1e-3)


@pytest.mark.system
def test_its_cifar10_example_runs_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(copy.deepcopy(CONFIG)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    program = [PROGRAM, "--deepspeed_config", str(tmp_path / "ds_config.json")]
    command = [*torchrun, "-m", "octet.compat.msamp", *program]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=LONG_S)
    assert found.returncode == 0, found.stderr
    first, second = (line.split(" ", 2)[2] for line in sorted(found.stdout.splitlines()) if "level" in line)
    assert first == second
    assert first.startswith("level O3")
