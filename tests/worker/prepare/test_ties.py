"""A tie that is made after `initialize`: the weight trains by both layers, as it does where the tie was made before."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from octet.worker import initialize
from octet.worker.optim import LowBitAdamW
from tests.kit.small_model import FP8_LEVELS, spread


class Language(nn.Module):
    """Embedding, two layers of one shape, and a head of the embedding's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        logits: Tensor = self.head(x + self.second(functional.gelu(self.first(x))))
        return logits


def built() -> Language:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Language()


TIES: dict[str, Callable[[Language], None]] = {
    "head to embedding": lambda model: setattr(model.head, "weight", model.embedding.weight),
    "embedding to head": lambda model: setattr(model.embedding, "weight", model.head.weight),
    "layer to layer": lambda model: setattr(model.second, "weight", model.first.weight),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses, and the first gradients by name."""
    ids, losses, gradients = torch.arange(64).view(4, 16), [], {}
    for _ in range(6):
        loss = functional.cross_entropy(model(ids).float().view(-1, 64), ids.roll(1).view(-1))
        loss.backward()
        held = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        gradients = gradients or {name: gradient.detach() + 0 for name, gradient in held.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


@pytest.mark.system
@pytest.mark.parametrize("makes_optimizer", ["before", "torch's, after", "ours, after"])
@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("level", [*spread(FP8_LEVELS), pytest.param("bf16-amp", marks=pytest.mark.matrix)])
def test_a_tie_after_initialize_trains_by_both_layers(level: str, tie: str, makes_optimizer: str) -> None:
    plain, model = built(), built()
    TIES[tie](plain)
    optimizer: torch.optim.Optimizer | None = None
    if makes_optimizer == "before":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _, optimizer = initialize(model, optimizer, level, convert_heads=True)
    TIES[tie](model)
    if makes_optimizer == "torch's, after":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    elif makes_optimizer == "ours, after":
        optimizer = LowBitAdamW(model.parameters(), LowBitAdamW.rule.defaults(lr=1e-2))
    assert optimizer is not None
    expected, its_gradients = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    losses, gradients = train(model, optimizer)
    assert expected[-1] < 0.95 * expected[0]
    assert losses == pytest.approx(expected, rel=3e-3)
    tied = ("first.weight", "second.weight") if tie == "layer to layer" else ("embedding.weight", "head.weight")
    error = gradients[tied[0]] - its_gradients[tied[0]]
    assert error.norm() < 0.15 * its_gradients[tied[0]].norm()  # of one layer alone: 0.7
    state = model.state_dict()
    assert torch.equal(*(state[name] for name in tied))
    assert len({id(module.weight) for module in model.modules() if hasattr(module, "weight")}) == 3
