"""Train a small network with Hugging Face Accelerate's loop at a precision level: `--level te`, `ao`, `O1`, `O2` or `O3`.

One process, or several under torchrun, where `octet.parallelize` takes the place of DDP:
gradients travel as the level says, and each rank holds its share of the optimizer's states.
"""

import argparse
import sys

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from octet import initialize, parallelize


def data(num_examples: int) -> TensorDataset:
    """Points on a sphere and what a fixed random network says of them: fp32 (64) and fp32 (16) each."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.nn.functional.normalize(torch.randn(num_examples, 64, generator=generator)) * 8
    return TensorDataset(inputs, torch.tanh(inputs @ torch.randn(64, 16, generator=generator) / 8))


def train(level: str, num_epochs: int) -> list[Tensor]:
    """Return the loss of each optimizer step."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
    model = model.to(accelerator.device)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_epochs * 16)
    parallel = parallelize(model, optimizer, zero_stage=1)  # on one process it changes nothing
    if accelerator.num_processes == 1:  # on several it would wrap the model in DDP
        model = accelerator.prepare(model)
    optimizer, loader, schedule = accelerator.prepare(optimizer, DataLoader(data(512), batch_size=16), schedule)
    losses = []
    for _ in range(num_epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model), parallel.no_sync(not accelerator.sync_gradients):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    parallel.clip_grad_norm_(1.0)
                    losses.append(accelerator.reduce(loss.detach(), "mean"))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return losses


def main() -> None:
    """Read the command line, train, and print the first and the last loss on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    losses = train(options.level, options.epochs)
    if Accelerator().is_main_process:
        sys.stdout.write(f"{options.level}: loss {losses[0]:.4f} -> {losses[-1]:.4f}\n")


if __name__ == "__main__":
    main()
