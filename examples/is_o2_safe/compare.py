"""Compare a level with fp32 on a small model: the same seeds, starts and batches, then the gap of the losses with its interval.

    python examples/is_o2_safe/compare.py --level O2 --seeds 3 --steps 300

It learns Python's own library byte by byte. docs/tutorial.md walks through it; put your model and your data in the place of
`Model` and `Text`.
"""

import argparse
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from octet import fp8_statistics, initialize, memory_report

T_QUANTILES = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Two-sided 95 % quantiles of Student's distribution, by degrees of freedom."""


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A decoder over bytes: int64 (batch, length) to fp32 logits (batch, length, 256)."""

    def __init__(self, width: int = 64, num_blocks: int = 2, num_heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Text:
    """The modules of Python's library as bytes; the last tenth is held out."""

    def __init__(self, length: int = 64) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        content = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        cut = len(content) * 9 // 10
        self.length, self.training, self.held_out = length, content[:cut], content[cut:]

    def batch(self, content: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw windows; returns tokens and targets, int64 (size, length) each."""
        starts = torch.randint(len(content) - self.length - 1, (size,), generator=generator)
        windows = torch.stack([content[start : start + self.length + 1] for start in starts.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class Result:
    """The result of one training at one level. worst_sqnr_db: the least signal to noise of an FP8 operand; None without any."""

    loss: float
    bytes_per_parameter: float
    worst_sqnr_db: float | None


def train(level: str, seed: int, steps: int, text: Text) -> Result:
    """Train from the seed's start on the seed's batches, and measure the loss on held-out text."""
    torch.manual_seed(seed)
    model: nn.Module = Model(length=text.length)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    every = 50 if level.startswith(("te", "O")) else None
    model, optimizer = initialize(model, optimizer, level, seed=seed, statistics_every=every)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens, targets = text.batch(text.training, 16, generator)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        held = memory_report(model, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    samples = [sample.sqnr_db for sample in fp8_statistics(model)] if every else []
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Result(held_out_loss(model, text), sum(held.values()) / num_parameters, min(samples, default=None))


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Text) -> float:
    """Return the mean loss over the same 32 batches for every model."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    batches = [text.batch(text.held_out, 16, generator) for _ in range(32)]
    losses = [functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) for tokens, targets in batches]
    return torch.stack(losses).mean().item()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent values and the half-width of its 95 % interval."""
    quantile = T_QUANTILES[min(len(values) - 1, max(T_QUANTILES))]
    return statistics.mean(values), quantile * statistics.stdev(values) / len(values) ** 0.5


def compare(level: str, seeds: Sequence[int], steps: int) -> list[tuple[Result, Result]]:
    """Train each seed at fp32 and at the level; print a line for each, and return the pairs."""
    text, pairs = Text(), []
    for seed in seeds:
        yardstick, ours = (train(name, seed, steps, text) for name in ("fp32", level))
        pairs.append((yardstick, ours))
        gap = ours.loss / yardstick.loss - 1
        print(f"seed {seed}: fp32 {yardstick.loss:.4f}, {level} {ours.loss:.4f}, gap {gap:+.2%}", flush=True)
    return pairs


def verdict(level: str, pairs: Sequence[tuple[Result, Result]], tolerance: float) -> str:
    """Say what the pairs show: safe if the whole interval of the gap lies below the tolerance."""
    gap, half = interval([ours.loss / yardstick.loss - 1 for yardstick, ours in pairs])
    yardstick, ours = pairs[0]
    if gap + half <= tolerance:
        answer = f"safe: worse by at most {gap + half:.2%}, and {tolerance:.2%} is allowed"
    elif gap - half > tolerance:
        answer = f"not safe: worse by at least {gap - half:.2%}, and {tolerance:.2%} is allowed"
    else:
        answer = f"open: the interval holds {tolerance:.2%}. Take more seeds"
    spread = statistics.stdev(yardstick.loss for yardstick, _ in pairs) / statistics.mean(pair[0].loss for pair in pairs)
    lines = [
        f"gap of {level} to fp32: {gap:+.2%} ± {half:.2%}; fp32's own losses differ by {spread:.2%} from seed to seed",
        f"bytes per parameter: fp32 {yardstick.bytes_per_parameter:.2f}, {level} {ours.bytes_per_parameter:.2f}",
    ]
    if ours.worst_sqnr_db is not None:
        lines.append(f"worst FP8 operand: {ours.worst_sqnr_db:.1f} dB signal to noise")
    return "\n".join([*lines, answer])


def main() -> None:
    """Read the command line, compare, and print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--seeds", type=int, default=3, help="how many; at least 2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tolerance", type=float, default=0.01, help="the largest gap that you accept")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds is {options.seeds}; allowed: at least 2, since one run shows no spread")
    pairs = compare(options.level, range(options.seeds), options.steps)
    sys.stdout.write(verdict(options.level, pairs, options.tolerance) + "\n")


if __name__ == "__main__":
    main()
