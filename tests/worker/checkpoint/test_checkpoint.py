"""Checkpoints are loaded bit for bit as they were saved, and a damaged checkpoint is never used."""

import json
from pathlib import Path

import pytest
import torch

from octet.api_schemas import CheckpointRef
from octet.worker import checkpoint
from octet.worker.mesh import TensorInPieces

STATE = {
    "model": {"w": torch.randn(3, 5).to(torch.float8_e4m3fn), "h": torch.randn(4).half(), "scale": torch.tensor(0.5)},
    "optimizer": {"state": {0: {"exp_avg": torch.arange(4, dtype=torch.uint8), "step": 7}}, "groups": [{"lr": 1e-3}]},
    "betas": (0.9, 0.95),
    "none": None,
    "piece": TensorInPieces(torch.arange(6).to(torch.float8_e4m3fn), (2, 3), ((0, 6),)),
    "no entries": TensorInPieces(torch.zeros(0, dtype=torch.int8), (0, 3), ((0, 0),)),
}
FILES = ["tensors.safetensors", "state.json", "rank_00000.safetensors", "manifest.json"]


def save(folder: Path, step: int = 12) -> CheckpointRef:
    saved = checkpoint.save(folder, step, STATE)
    assert saved is not None
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
    assert loaded["piece"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["no entries"].shape == (0, 3)


def test_saving_again_replaces_and_leaves_nothing_unfinished(tmp_path: Path) -> None:
    assert save(tmp_path) == save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000012"]


def test_what_an_attempt_that_died_has_left_is_not_in_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".unfinished_step_0000000012"
    left.mkdir()
    for name in ("rank_00000.safetensors", "rank_00007.safetensors", "manifest.json"):
        (left / name).write_bytes(b"half of")
    ref = save(tmp_path)
    assert sorted(path.name for path in (tmp_path / ref.name).iterdir()) == sorted(FILES)
    assert not left.exists()
    checkpoint.load(tmp_path, ref)


def test_pieces_that_are_not_the_whole_are_refused(tmp_path: Path) -> None:
    half = TensorInPieces(torch.ones(4), (8,), ((0, 4),))
    saved = checkpoint.save(tmp_path, 3, {"model": {"w": half}})
    assert saved is not None
    with pytest.raises(checkpoint.BadCheckpoint, match=r"the pieces of /model/w are not the whole tensor, \(8,\)"):
        checkpoint.load(tmp_path, CheckpointRef(step=3, name=saved.name, sha256=saved.sha256))


def test_a_state_without_pieces_has_the_format_of_before(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, 3, {"model": STATE["model"]})
    assert saved is not None
    manifest = json.loads((tmp_path / saved.name / "manifest.json").read_text())
    assert manifest["version"] == 1
    assert set(manifest["files"]) == {"tensors.safetensors", "state.json"}


@pytest.mark.parametrize("name", FILES)
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
