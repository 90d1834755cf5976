"""A network for jobs of family python that plants bad recipes which no field of a job has, in its rank's process alone.

Its activations have the outliers that make a recipe bad: a channel or a token far larger than the rest, as large language
models have them (Sun et al., "Massive Activations in Large Language Models", 2024).
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octet.worker.fp8.loss_scaling import LossScaling

NUM_SEEN, WIDTH, VOCABULARY = 4, 64, 256
TWIN_CHANGE = 5e-4
"""The relative change of the initial values of a twin, whose recipe is the baseline's."""

Planted = Literal["nothing", "twin", "no_loss_scaling"]


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
        embedded_BTE = self.embedding(batch["tokens"])
        num_tokens = embedded_BTE.shape[1]
        x_BTD = torch.cat([F.pad(embedded_BTE, (0, 0, ago, 0))[:, :num_tokens] for ago in range(NUM_SEEN)], -1)
        for layer in self.layers:
            x_BTD = x_BTD + F.gelu(layer(self._with_outliers(self.norm(x_BTD))))
        logits_BTV = self.head(self.norm(x_BTD)).float()
        return self.loss_weight * F.cross_entropy(logits_BTV.flatten(0, 1), batch["targets"].flatten())

    def _with_outliers(self, x_BTD: Tensor) -> Tensor:
        if self.channel:
            x_BTD = torch.cat((torch.full_like(x_BTD[..., :1], self.channel), x_BTD[..., 1:]), -1)
        return torch.cat((x_BTD[:, :1] * self.token, x_BTD[:, 1:]), 1)


def build(
    planted: Planted = "nothing", depth: int = 2, channel: float = 0.0, token: float = 1.0, loss_weight: float = 1.0
) -> WindowNetwork:
    """Build the network, in a process that trains nothing else."""
    if planted == "no_loss_scaling":
        LossScaling.__init__.__defaults__ = (1.0, 2**62)  # type: ignore[attr-defined]
    network = WindowNetwork(depth, channel, token, loss_weight)
    if planted == "twin":
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1 + TWIN_CHANGE * torch.randn_like(parameter))
    return network
