"""The one seam between the public operations and what runs them."""

from types import ModuleType

import torch

from worker.kernels import reference


def implementation(device: torch.device) -> ModuleType:
    """The module that has a device's kernels: the plain-torch reference, until a device has kernels of its own."""
    return reference
