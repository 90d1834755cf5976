"""A loop of one's own starts a folder by shard, saves, and goes on in another layout; no rank ever holds the whole model."""

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from octet import load_checkpoint, load_pretrained, memory_report, parallelize, plain_state_dict, save_checkpoint
from octet.worker.checkpoint import BadCheckpoint
from octet.worker.fp8 import weights
from octet.worker.parallel import Parallel
from tests.kit.live_storages import LiveStorages
from tests.kit.ports import free_port
from tests.kit.pretrained_models import TOKENS, logits_of, their_llama
from tests.kit.ranks import run_ranks, saved_by_ranks

LEVELS = ("O2", "O3-split")
LARGEST = 192 * 128
"""Elements of the largest parameter of `their_llama`, 4 bytes each while it is read."""
NUM_TEMPORARIES = 3
"""Tensors of the largest parameter in fp32 that are alive at once: its values, the rank's part of them, and what encodes it."""
LAYOUTS: dict[str, dict[str, Any]] = {"zero 3": {"zero_stage": 3}, "zero 1": {"zero_stage": 1}, "tensor": {"tensor": 2}}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def start(folder: Path, level: str, *, by_shard: bool, **layout: Any) -> Parallel:
    model, optimizer = load_pretrained(folder, level, make_optimizer=adamw, by_shard=by_shard)
    assert optimizer is not None
    return parallelize(model, optimizer, **layout)


def step(parallel: Parallel) -> None:
    """Train one step on the same tokens on every rank."""
    model, optimizer = parallel.model, parallel.optimizer
    nn.functional.cross_entropy(logits_of(model).float().flatten(0, 1), TOKENS.flatten()).backward()
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def values_after(parallel: Parallel, num_steps: int) -> dict[str, torch.Tensor]:
    for _ in range(num_steps):
        step(parallel)
    return {name: value.clone() for name, value in plain_state_dict(parallel.model).items()}


def measured_start(folder: Path, level: str, **layout: Any) -> tuple[Parallel, int, int]:
    """Return what starts by shard, the most bytes that were alive meanwhile, and the bytes that are held at the end."""
    gc.collect()
    with mock.patch.object(weights, "PIECE_ELEMENTS", 1 << 11), LiveStorages() as live:
        parallel = start(folder, level, by_shard=True, **layout)
    return parallel, live.peak_bytes, sum(memory_report(parallel.model, parallel.optimizer).values())


def on_ranks(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for level in LEVELS:
        for name, layout in LAYOUTS.items():
            whole = values_after(start(Path(folder, "model"), level, by_shard=False, **layout), 2)
            parallel, peak, held = measured_start(Path(folder, "model"), level, **layout)
            by_shard = values_after(parallel, 2)
            save_checkpoint(parallel, Path(folder, f"{level} {name}"), 2, {"schedule": {"last": rank}})
            found[f"{level} {name}"] = {"whole": whole, "by_shard": by_shard, "peak": peak, "held": held}
            found[f"{level} {name}"]["third"] = values_after(parallel, 1)
    for level in LEVELS:
        for saved, name in [("zero 3", "zero 3"), ("zero 3", "tensor"), ("tensor", "zero 1")]:
            again = start(Path(folder, "model"), level, by_shard=True, **LAYOUTS[name])
            loaded = load_checkpoint(again, Path(folder, f"{level} {saved}"))
            found[f"{level} {saved} in {name}"] = {"loaded": loaded, "third": values_after(again, 1)}
    for name in ("zero 0", "zero 3"):
        parallel = start(Path(folder, "model"), "O2", by_shard=True, zero_stage=int(name[-1]))
        try:
            save_checkpoint(parallel, Path(folder, "model", "config.json"), 1)
        except OSError as error:
            found[f"no folder, {name}"] = str(error)
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.system
def test_a_folder_is_read_by_shard_and_goes_on_in_any_layout(tmp_path: Path) -> None:
    model: Any = their_llama()
    model.save_pretrained(tmp_path / "model")
    run_ranks(on_ranks, (free_port(), str(tmp_path)), 2)
    for rank, found in enumerate(saved_by_ranks(tmp_path, 2)):
        assert ("another rank could not write" in found["no folder, zero 0"]) == (rank == 1)
        assert "config.json" in found["no folder, zero 3"] + found["no folder, zero 0"]
        for level in LEVELS:
            for name in LAYOUTS:
                run = found[f"{level} {name}"]
                assert run["whole"].keys() == run["by_shard"].keys()
                assert all(torch.equal(value, run["by_shard"][key]) for key, value in run["whole"].items()), (level, name)
                assert run["held"] <= run["peak"] <= run["held"] + NUM_TEMPORARIES * 4 * LARGEST, (level, name)
            for saved, name in [("zero 3", "zero 3"), ("zero 3", "tensor"), ("tensor", "zero 1")]:
                again = found[f"{level} {saved} in {name}"]
                assert again["loaded"] == (2, {"schedule": {"last": 0}})
                expected = found[f"{level} {saved}"]["third"]
                if saved == name:
                    assert all(torch.equal(value, again["third"][key]) for key, value in expected.items())
                for key, value in expected.items():
                    torch.testing.assert_close(again["third"][key], value, rtol=0.05, atol=6e-3)


def test_one_process_reads_and_saves_in_the_same_way(tmp_path: Path) -> None:
    their_llama().save_pretrained(tmp_path / "model")  # type: ignore[operator]  # of transformers
    whole = values_after(start(tmp_path / "model", "O2", by_shard=False), 1)
    parallel = start(tmp_path / "model", "O2", by_shard=True)
    found = values_after(parallel, 1)
    assert all(torch.equal(value, found[name]) for name, value in whole.items())
    assert load_checkpoint(parallel, tmp_path / "run") is None
    save_checkpoint(parallel, tmp_path / "run", 1)
    step(parallel)
    save_checkpoint(parallel, tmp_path / "run", 2, {"position": 8})
    expected = values_after(parallel, 1)
    (tmp_path / "run" / "step_0000000002" / "tensors.safetensors").write_bytes(b"damaged")
    again = start(tmp_path / "model", "O2", by_shard=True)
    with pytest.warns(UserWarning, match="step_0000000002/tensors.safetensors differs from its manifest"):
        assert load_checkpoint(again, tmp_path / "run") == (1, {})
    values_after(again, 1)
    continued = values_after(again, 1)
    assert all(torch.equal(value, continued[name]) for name, value in expected.items())
    (tmp_path / "run" / "step_0000000001" / "state.json").write_text("damaged")
    with (
        pytest.warns(UserWarning, match="trying the checkpoint before"),
        pytest.raises(BadCheckpoint, match=r"no checkpoint in .* can be read, the newest because step_0000000002/tensors"),
    ):
        load_checkpoint(again, tmp_path / "run")


def test_a_model_without_values_says_so(tmp_path: Path) -> None:
    their_llama().save_pretrained(tmp_path)  # type: ignore[operator]  # of transformers
    model, optimizer = load_pretrained(tmp_path, "O2", make_optimizer=adamw, by_shard=True)
    for use in (lambda: logits_of(model), model.state_dict):
        with pytest.raises(RuntimeError, match=r"no values yet: .* Call octet\.parallelize"):
            use()
    assert optimizer is not None
    with pytest.raises(ValueError, match="zero_stage"):
        parallelize(model, optimizer, zero_stage=7)
    with pytest.raises(RuntimeError, match="no values yet"):
        logits_of(model)
    parallelize(model, optimizer)
    assert logits_of(model).isfinite().all()
    with pytest.raises(
        ValueError, match="by_shard is True and the optimizer is NoneType; allowed: one that initialize takes over"
    ):
        load_pretrained(tmp_path, "O2", by_shard=True)
    with pytest.raises(ValueError, match="by_shard is True at level ao; allowed: other levels"):
        load_pretrained(tmp_path, "ao", make_optimizer=adamw, by_shard=True)
