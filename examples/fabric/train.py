"""Train a small network with Lightning Fabric's loop at a precision level: `--level O2`, on several ranks by torchrun."""

import argparse
import os
import sys

import torch
from lightning_fabric import Fabric
from torch import nn

from octet import carry_model_state, initialize


def train(level: str, num_steps: int, file: str | None = None, resumed: str | None = None) -> list[float]:
    """Return the loss of each step.

    file: for the state after the last step. resumed: a file to continue from.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=num_ranks,
        strategy="ddp" if num_ranks > 1 else "auto",
    )
    fabric.launch()
    fabric.seed_everything(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
    model = model.to(fabric.device)  # before initialize, which encodes weights where they are
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    carry_model_state(model, optimizer)  # a resume is equal bit for bit
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    if resumed is not None:
        fabric.load(resumed, state)
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(fabric.global_rank)).to(fabric.device)
    targets = torch.tanh(inputs[:, :16] - inputs[:, 16:32])
    losses = []
    for _ in range(num_steps):
        loss = (model(inputs) - targets).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if file is not None:
        fabric.save(file, state)
    return losses


def main() -> None:
    """Read the command line, train, and print the first and the last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", default=None, help="file for the state after the last step")
    parser.add_argument("--resume", default=None, help="file of a state to continue from")
    options = parser.parse_args()
    losses = train(options.level, options.steps, options.save, options.resume)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"{options.level}: loss {losses[0]:.4f} -> {losses[-1]:.4f}\n")


if __name__ == "__main__":
    main()
