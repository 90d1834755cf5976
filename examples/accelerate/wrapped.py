"""Train a small network under Accelerate with torch's own wrappers, DDP or FSDP2.

    torchrun --nproc-per-node 2 examples/accelerate/wrapped.py --level te
    torchrun --nproc-per-node 2 examples/accelerate/wrapped.py --level ao --wrapper fsdp2 --gather fp8
    torchrun --nproc-per-node 2 examples/accelerate/wrapped.py --level O3 --wrapper fsdp2

`--gather fp8` is for te and ao, whose weights are values. Those of O1, O2 and O3 are codes, which FSDP2 gathers as they are.
"""

import argparse
import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from octet import follow_optimizer, initialize


def data(num_examples: int) -> TensorDataset:
    """Points on a sphere and what a fixed random network says of them: fp32 (64) and fp32 (16) each."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.nn.functional.normalize(torch.randn(num_examples, 64, generator=generator)) * 8
    return TensorDataset(inputs, torch.tanh(inputs @ torch.randn(64, 16, generator=generator) / 8))


def prepared(accelerator: Accelerator, level: str, wrapper: str, gather: str) -> tuple[Any, Any]:
    """The model in its wrapper, and its optimizer. gather: the dtype in which FSDP2 gathers weights."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
    model = model.to(accelerator.device)
    if wrapper == "ddp":
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
        return accelerator.prepare(model, optimizer)
    in_fp8 = {"fsdp_float8_all_gather": gather == "fp8"}
    options: dict[str, Any] = {"torchao": in_fp8} if level == "ao" else in_fp8
    model, _ = initialize(model, None, level, **options)
    fully_shard(model)  # before the optimizer, which is made of the shards
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    follow_optimizer(model, optimizer)
    return model, accelerator.prepare(optimizer)


def train(level: str, wrapper: str, gather: str, num_epochs: int) -> list[Tensor]:
    """Return the mean loss of each optimizer step over the ranks."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator, level, wrapper, gather)
    loader = accelerator.prepare(DataLoader(data(512), batch_size=16))
    losses = []
    for _ in range(num_epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    losses.append(accelerator.reduce(loss.detach(), "mean"))
                optimizer.step()
                optimizer.zero_grad()
    return losses


def main() -> None:
    """Read the command line, train, and print the first and the last loss on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="te")
    parser.add_argument("--wrapper", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--gather", choices=("fp32", "fp8"), default="fp32", help="for --wrapper fsdp2")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    losses = train(options.level, options.wrapper, options.gather, options.epochs)
    if Accelerator().is_main_process:
        sys.stdout.write(f"{options.level}: loss {losses[0]:.4f} -> {losses[-1]:.4f}\n")


if __name__ == "__main__":
    main()
