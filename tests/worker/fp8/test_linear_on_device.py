"""The linear layer on a GPU: it compiles, and a CUDA graph replays it. Only a GPU can show this. `pytest -m gpu`."""

import pytest
import torch
from torch import Tensor, nn

from octet.worker import initialize

pytestmark = pytest.mark.gpu


def gaussian(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def network(level: str, recipe: dict[str, object]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    model, _ = initialize(model, torch.optim.AdamW(model.parameters()), opt_level=level, recipe=recipe, auto_filter=False)
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler about itself
@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
@pytest.mark.parametrize("level", ["te", "O2", "O3"])
class TestLinear:
    def test_inductor_gives_the_same_loss(self, level: str, granularity: str) -> None:
        torch.compiler.reset()
        eager, model = (network(level, {"granularity": granularity}) for _ in range(2))
        x = gaussian(128, 256).cuda().requires_grad_()
        twin = x.detach().clone().requires_grad_()
        expected, output = eager(x), torch.compile(model, fullgraph=True)(twin)
        torch.testing.assert_close(output, expected, rtol=2**-6, atol=2**-6)
        expected.float().square().mean().backward()
        output.float().square().mean().backward()
        torch.testing.assert_close(twin.grad, x.grad, rtol=0.1, atol=float(x.grad.abs().max()) / 16)

    def test_a_cuda_graph_replays_forward_and_backward(self, level: str, granularity: str) -> None:
        model, x = network(level, {"granularity": granularity}).eval(), gaussian(128, 256).cuda().requires_grad_()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which quantizes the weights
        with torch.cuda.stream(stream):
            for _ in range(3):
                (gradient,) = torch.autograd.grad(model(x).float().square().sum(), x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (replayed,) = torch.autograd.grad(model(x).float().square().sum(), x)
        replayed.zero_()
        graph.replay()
        assert torch.equal(replayed, gradient)
