"""Transposed codes: every byte in its place, whatever the size, the strides and the tile."""

import pytest
import torch

from octet.worker.kernels.cuda import language, transpose

DEVICE = "cpu" if language.INTERPRETED.value else "cuda"


@pytest.mark.parametrize("tile", [(128, 128), (32, 64), (64, 32)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 129), (127, 128), (129, 257), (256, 1), (0, 5), (5, 0)])
def test_every_byte(shape: tuple[int, int], tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transpose, "TILE_M", tile[0])
    monkeypatch.setattr(transpose, "TILE_N", tile[1])
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    out = transpose.transpose(codes.view(torch.float8_e5m2))
    assert out.is_contiguous()
    assert torch.equal(out.view(torch.uint8), codes.t())


def test_strided_codes() -> None:
    codes = torch.randint(0, 256, (200, 300), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for part in (codes[10:150, 5:170], codes[:, ::2], codes.t()):
        assert torch.equal(transpose.transpose(part.view(torch.float8_e4m3fn)).view(torch.uint8), part.t())
