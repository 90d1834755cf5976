"""The bytes that a forward pass keeps for its backward pass, counted once from the tensors that autograd saves."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from worker.metrics.table import Metrics


class ActivationCount:
    """Counts the bytes of distinct storages that autograd saves, except those of parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        tensors = (*model.parameters(), *model.buffers())
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.num_bytes = 0

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.num_bytes += storage.nbytes()
        return tensor


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
