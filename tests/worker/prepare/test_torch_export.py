"""torch.export takes an initialized model as it takes any other; what it writes computes in FP8 wherever Octet is installed."""

import io

import pytest
import torch
from torch import nn

from octet.worker import initialize
from tests.kit.small_model import FP8_LEVELS

pytestmark = pytest.mark.system


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + self.layers(tokens)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.parametrize("level", [*FP8_LEVELS, "bf16-amp"])
def test_an_exported_program_has_the_models_bits_for_other_batches(level: str) -> None:
    model, _ = initialize(Net(), None, level)
    model.eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (torch.randn(4, 64),), dynamic_shapes=({0: batch},))
    assert any("octet.linear_output" in str(node.target) for node in exported.graph.nodes) is (level != "bf16-amp")
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    tokens = torch.randn(7, 64)
    assert torch.equal(torch.export.load(file).module()(tokens), model(tokens))
