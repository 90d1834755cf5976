"""The bytes that a forward pass keeps for its backward pass, counted once from the tensors that autograd saves.

Weights that are gathered for one block at a time (ZeRO stage 3) are freed after the block, and count nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from octet.worker.kernels.torch_private import key_of_storage
from octet.worker.metrics.memory import held_tensors
from octet.worker.metrics.table import Metrics


class ActivationCount:
    """Counts the bytes of distinct storages that autograd saves, except those of parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._of_model = {key_of_storage(tensor.untyped_storage()) for _, tensor in held_tensors(model)}
        self._saved: dict[int, torch.UntypedStorage] = {}

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if key_of_storage(storage) not in self._of_model:
            self._saved[key_of_storage(storage)] = storage
        return tensor

    @property
    def num_bytes(self) -> int:
        """The bytes that the storages have now."""
        return sum(storage.nbytes() for storage in self._saved.values())


@contextmanager
def activations_counted_once(model: nn.Module, metrics: Metrics) -> Iterator[None]:
    """Wrap a forward pass. The first pass counts its saved tensors into `metrics`; the tensors stay unchanged."""
    if metrics.knows("octet_memory_bytes", "activations"):
        yield
        return
    count = ActivationCount(model)
    with saved_tensors_hooks(count.note, _unchanged):
        yield
    metrics.observe_memory({"activations": count.num_bytes})


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
