"""Networks for jobs of family python that plant bad recipes which no field of a job has, in their rank's process alone.

The activations of one have the outliers that make a recipe bad: a channel or a token far larger than the rest, as large
language models have them (Sun et al., "Massive Activations in Large Language Models", 2024). The other learns a linear map,
whose loss ends as the error of rounding.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octet.worker.fp8 import recipe
from octet.worker.fp8.loss_scaling import LossScaling

NUM_SEEN, WIDTH, VOCABULARY = 4, 64, 256
TWIN_CHANGE = 5e-4
"""The relative change of the initial values of a twin, whose recipe is the baseline's."""

Planted = Literal["nothing", "twin", "e5m2", "no_loss_scaling"]


Network = TypeVar("Network", bound=nn.Module)


class WindowNetwork(nn.Module):
    """Predicts a byte from the `NUM_SEEN` before it.

    channel: the value of an input of each layer, 0 for none. token: the factor of the first token's inputs. loss_weight: of the
    loss, which makes gradients as small as the mean over a large batch does.
    """

    def __init__(self, depth: int, channel: float, token: float, loss_weight: float) -> None:
        super().__init__()
        self.channel, self.token, self.loss_weight = channel, token, loss_weight
        self.embedding = nn.Embedding(VOCABULARY, WIDTH // NUM_SEEN)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted mean loss, ()."""
        x_BTD = _windows(self.embedding(batch["tokens"]))
        for layer in self.layers:
            x_BTD = x_BTD + F.gelu(layer(self._with_outliers(self.norm(x_BTD))))
        logits_BTV = self.head(self.norm(x_BTD)).float()
        return self.loss_weight * F.cross_entropy(logits_BTV.flatten(0, 1), batch["targets"].flatten())

    def _with_outliers(self, x_BTD: Tensor) -> Tensor:
        if self.channel:
            x_BTD = torch.cat((torch.full_like(x_BTD[..., :1], self.channel), x_BTD[..., 1:]), -1)
        return torch.cat((x_BTD[:, :1] * self.token, x_BTD[:, 1:]), 1)


class Student(nn.Module):
    """Learns a fixed linear map of fixed features of the last `NUM_SEEN` bytes.

    The map is within its reach, and the problem is convex: what rounding adds is all that is left of the loss, whatever the
    start and the order of the data.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # the same map for every seed of a job
        self.register_buffer("features", torch.randn(VOCABULARY, WIDTH // NUM_SEEN, generator=generator))
        self.register_buffer("teacher", torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean squared error, (), of outputs whose variance is 1."""
        x_BTD = _windows(F.embedding(batch["tokens"], self.features))
        return F.mse_loss(self.layer(x_BTD).float(), F.linear(x_BTD, self.teacher))


def _windows(embedded_BTE: Tensor) -> Tensor:
    """Return each token's embedding beside those of the tokens before it, (B, T, NUM_SEEN * E)."""
    num_tokens = embedded_BTE.shape[1]
    return torch.cat([F.pad(embedded_BTE, (0, 0, ago, 0))[:, :num_tokens] for ago in range(NUM_SEEN)], -1)


def build(
    planted: Planted = "nothing", depth: int = 2, channel: float = 0.0, token: float = 1.0, loss_weight: float = 1.0
) -> WindowNetwork:
    """Build the network, in a process that trains nothing else."""
    return _planted(WindowNetwork(depth, channel, token, loss_weight), planted)


def build_student(planted: Planted = "nothing") -> Student:
    """Build the student, in a process that trains nothing else."""
    return _planted(Student(), planted)


def _planted(network: Network, planted: Planted) -> Network:
    patched: Any = recipe  # Any: constants are replaced
    if planted == "e5m2":
        patched.E4M3 = torch.float8_e5m2
        patched.Recipe.__post_init__ = lambda _recipe: None  # which refuses what CUDA cannot multiply
    if planted == "no_loss_scaling":
        LossScaling.__init__.__defaults__ = (1.0, 2**62)  # type: ignore[attr-defined]
    if planted == "twin":
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1 + TWIN_CHANGE * torch.randn_like(parameter))
    return network
