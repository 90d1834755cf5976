"""Train a small network with Lightning's Trainer at a precision level: `--level O2`, on `--ranks 2`, and `--resume` it."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from octet import carry_model_state, initialize


class Regression(LightningModule):
    """A converted network and its optimizer."""

    def __init__(self, level: str) -> None:
        super().__init__()
        network: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
        self.network, self.optimizer = initialize(network, torch.optim.AdamW(network.parameters(), lr=1e-2), level)
        carry_model_state(self.network, self.optimizer)  # a checkpoint continues bit for bit
        self.losses: list[float] = []

    def training_step(self, batch: Any, _index: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, targets = batch
        loss: Tensor = (self.network(inputs) - targets).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer that `initialize` returned."""
        return self.optimizer


def data(num_examples: int) -> TensorDataset:
    """Random points and a function of them: fp32 (64) and fp32 (16) each."""
    inputs = torch.randn(num_examples, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, torch.tanh(inputs[:, :16] - inputs[:, 16:32]))


def train(level: str, num_epochs: int, num_ranks: int, folder: Path, resumed: str | None) -> list[float]:
    """Train up to a number of epochs, save a checkpoint after each of them in the folder, and return the losses."""
    seed_everything(0, verbose=False)
    module = Regression(level)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=num_ranks,
        strategy="ddp" if num_ranks > 1 else "auto",
        max_epochs=num_epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        **quiet,
    )
    trainer.fit(module, DataLoader(data(256), batch_size=32), ckpt_path=resumed, weights_only=False)
    return module.losses


def main() -> None:
    """Read the command line, train, and print the first and the last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("lightning"))
    parser.add_argument("--resume", default=None, help="a checkpoint to continue from")
    options = parser.parse_args()
    losses = train(options.level, options.epochs, options.ranks, options.folder, options.resume)
    sys.stdout.write(f"{options.level}: loss {losses[0]:.4f} -> {losses[-1]:.4f}\n")


if __name__ == "__main__":
    main()
