"""Checkpoints are loaded bit for bit as they were saved, and a damaged checkpoint is never used."""

from pathlib import Path

import pytest
import torch

from api_schemas import CheckpointRef
from worker import checkpoint

STATE = {
    "model": {"w": torch.randn(3, 5).to(torch.float8_e4m3fn), "h": torch.randn(4).half(), "scale": torch.tensor(0.5)},
    "optimizer": {"state": {0: {"exp_avg": torch.arange(4, dtype=torch.uint8), "step": 7}}, "groups": [{"lr": 1e-3}]},
    "betas": (0.9, 0.95),
    "none": None,
}


def save(folder: Path, step: int = 12) -> CheckpointRef:
    saved = checkpoint.save(folder, step, STATE)
    return CheckpointRef(step=step, name=saved.name, sha256=saved.sha256)


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    loaded = checkpoint.load(tmp_path, save(tmp_path))
    for name, tensor in STATE["model"].items():
        assert loaded["model"][name].dtype == tensor.dtype
        assert torch.equal(loaded["model"][name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert loaded["optimizer"]["state"][0]["step"] == 7
    assert loaded["optimizer"]["groups"] == [{"lr": 1e-3}]
    assert loaded["betas"] == (0.9, 0.95)
    assert loaded["none"] is None


def test_saving_again_replaces_and_leaves_nothing_unfinished(tmp_path: Path) -> None:
    assert save(tmp_path) == save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000012"]


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_file_is_found(tmp_path: Path, name: str, damage: str) -> None:
    ref = save(tmp_path)
    path = tmp_path / ref.name / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    with pytest.raises(checkpoint.BadCheckpoint):
        checkpoint.load(tmp_path, ref)


def test_a_whole_checkpoint_that_is_not_the_registered_one_is_refused(tmp_path: Path) -> None:
    ref = save(tmp_path)
    with pytest.raises(checkpoint.BadCheckpoint, match="not have the registered SHA-256"):
        checkpoint.load(tmp_path, ref.model_copy(update={"sha256": "0" * 64}))
