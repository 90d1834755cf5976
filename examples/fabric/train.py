"""Train a small network with Lightning Fabric's loop at a precision level, in one process: `--level O2`."""

import argparse
import sys

import torch
from lightning_fabric import Fabric
from torch import nn

from octet import initialize


def train(level: str, num_steps: int) -> list[float]:
    """Return the loss of each step."""
    fabric = Fabric(accelerator="auto", devices=1)
    fabric.seed_everything(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
    model = model.to(fabric.device)  # before initialize, which encodes weights where they are
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    model, optimizer = fabric.setup(model, optimizer)
    inputs = torch.randn(32, 64, device=fabric.device)
    targets = torch.tanh(inputs[:, :16] - inputs[:, 16:32])
    losses = []
    for _ in range(num_steps):
        loss = (model(inputs) - targets).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Read the command line, train, and print the first and the last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    losses = train(options.level, options.steps)
    sys.stdout.write(f"{options.level}: loss {losses[0]:.4f} -> {losses[-1]:.4f}\n")


if __name__ == "__main__":
    main()
