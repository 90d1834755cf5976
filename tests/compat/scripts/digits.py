"""Pictures of ten classes, which a small network learns in a few dozen steps; in the place of a download."""

import torch
from torch.utils.data import TensorDataset


def digits(count: int, channels: int = 1, size: int = 28, seed: int = 0) -> TensorDataset:
    """Return pictures, (count, channels, size, size), each the picture of its class with noise, and their classes."""
    generator = torch.Generator().manual_seed(0)
    of_classes = torch.randn(10, channels, size, size, generator=generator)
    generator.manual_seed(seed + 1)
    targets = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(of_classes[targets] + torch.randn(count, channels, size, size, generator=generator), targets)
