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

from octet import carry_model_state, initialize, parallelize


def data(num_examples: int) -> TensorDataset:
    """Points on a sphere and what a fixed random network says of them: fp32 (64) and fp32 (16) each."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.nn.functional.normalize(torch.randn(num_examples, 64, generator=generator)) * 8
    return TensorDataset(inputs, torch.tanh(inputs @ torch.randn(64, 16, generator=generator) / 8))


def train(level: str, num_epochs: int, folder: str | None = None, num_done: int = 0) -> list[Tensor]:
    """Return the loss of each optimizer step. folder: gets the state after each epoch. num_done: epochs to continue after."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
    # It moves the model and registers it for `save_state`; in evaluation mode Accelerate does not wrap it in DDP.
    model = accelerator.prepare_model(model, evaluation_mode=True)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_epochs * 16)
    carry_model_state(model, optimizer)  # a resume is equal bit for bit
    parallel = parallelize(model, optimizer, zero_stage=1)  # on one process it changes nothing
    optimizer, loader, schedule = accelerator.prepare(optimizer, DataLoader(data(512), batch_size=16), schedule)
    if num_done:
        accelerator.load_state(f"{folder}/epoch-{num_done}")
    losses = []
    for epoch in range(num_done, num_epochs):
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
        if folder is not None:
            accelerator.save_state(f"{folder}/epoch-{epoch + 1}")
    return losses


def main() -> None:
    """Read the command line, train, and print the first and the last loss on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", default=None, help="for the state after each epoch")
    parser.add_argument("--resume", type=int, default=0, help="the number of the epoch to continue after")
    options = parser.parse_args()
    losses = train(options.level, options.epochs, options.folder, options.resume)
    if Accelerator().is_main_process:
        sys.stdout.write(f"{options.level}: loss {losses[0]:.4f} -> {losses[-1]:.4f}\n")


if __name__ == "__main__":
    main()
