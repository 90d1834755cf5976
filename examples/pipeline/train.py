"""Train a network whose blocks ranks divide, in a loop of one's own: torchrun starts the ranks.

With `--pipeline 2` on four ranks, two ranks hold each half of the blocks, and read different samples.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from octet import initialize, parallelize

VOCABULARY, WIDTH, TOKENS, BATCH = 64, 64, 16, 32


class Block(nn.Module):
    """A residual MLP that also sees the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        before = functional.pad(normed, (0, 0, 1, -1))
        output: Tensor = self.mlp(torch.cat((normed, before), dim=-1))
        return x + output


class Network(nn.Module):
    """A stage finds its own blocks in `layers`, and None for what only the first or the last stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.head is not None:
            x = self.head(self.norm(x))
        return x


def batch_of(step: int, share: int) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards by steps of their own: tokens and those that follow, int64 (B, T)."""
    numbers = torch.Generator().manual_seed(1000 * step + share)
    first, stride = (torch.randint(1, high, (BATCH, 1), generator=numbers) for high in (VOCABULARY, 4))
    tokens = (first + stride * torch.arange(TOKENS + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy in nats, fp32 ()."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train(level: str, num_steps: int, pipeline: int) -> None:
    """Train, and print the first and the last loss of the first data rank."""
    is_on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_on_gpu else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if is_on_gpu else torch.device("cpu")
    if is_on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model: nn.Module = Network().to(device)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), level)
    parallel = parallelize(model, optimizer, pipeline=pipeline, micro_batches=8, blocks="layers", zero_stage=1)
    losses = []
    for step in range(num_steps):
        tokens, targets = (part.to(device) for part in batch_of(step, parallel.data.rank))
        loss = parallel.step(tokens, targets, mean_loss)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None:  # on the last stage
            losses.append(loss)
    if parallel.is_last_stage and parallel.data.is_first:
        sys.stdout.write(f"{level}: loss {losses[0]:.4f} -> {losses[-1]:.4f}\n")
    dist.destroy_process_group()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pipeline", type=int, default=2)
    options = parser.parse_args()
    train(options.level, options.steps, options.pipeline)


if __name__ == "__main__":
    main()
