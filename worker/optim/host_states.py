"""Optimizer states in host memory: each parameter's are on its device only while the parameter is stepped.

On CUDA the host's copies are pinned, and a stream of its own brings the next parameter's states while the present one is
stepped, and takes them back (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840, with the update on the device). The CPU runs the
same code without streams. The numbers are those of a step without offload, bit for bit.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octet.worker.optim.rules.rule import Group

Parts = dict[str, dict[str, Tensor]]


class _Fetched(NamedTuple):
    """A parameter's states on its device. ready: when they are there; None without streams."""

    parts: Parts
    ready: torch.cuda.Event | None


class HostStates:
    """Moves the named states of an optimizer's parameters between host and device."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def hold(self, state: dict[str, Any]) -> None:
        """Move one parameter's states to host memory, pinned if they come from CUDA."""
        for name in self.names:
            state[name] = {part: _on_host(tensor) for part, tensor in state[name].items()}

    def visit(
        self, updates: list[tuple[Tensor, Group]], states: Mapping[Tensor, dict[str, Any]]
    ) -> Iterator[tuple[Tensor, Group]]:
        """Yield updates one by one, each while its parameter's states are on the device."""
        fetched = self._fetch(updates[0][0], states) if updates else None
        for index, (parameter, group) in enumerate(updates):
            assert fetched is not None
            current = fetched
            fetched = self._fetch(updates[index + 1][0], states) if index + 1 < len(updates) else None
            if current.ready is not None:
                torch.cuda.current_stream(parameter.device).wait_event(current.ready)
            state = states[parameter]
            host: Parts = {name: state[name] for name in self.names}
            state.update(current.parts)
            yield parameter, group
            current.parts.update({name: state[name] for name in self.names})
            self._store(parameter.device, host, current.parts)
            state.update(host)

    def synchronize(self) -> None:
        """Wait until what is on its way to the host is there."""
        for stream in self._streams.values():
            stream.synchronize()

    def _fetch(self, parameter: Tensor, states: Mapping[Tensor, dict[str, Any]]) -> _Fetched:
        device = parameter.device
        with self._on_stream(device):
            parts = {
                name: {part: host.to(device, copy=True, non_blocking=True) for part, host in states[parameter][name].items()}
                for name in self.names
            }
        return _Fetched(parts, self._streams[device].record_event() if device.type == "cuda" else None)

    def _store(self, device: torch.device, host: Parts, parts: Parts) -> None:
        """Copy states to the host, after all that the device still does with them."""
        if device.type == "cuda":
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        with self._on_stream(device):
            for name, tensors in parts.items():
                for part, tensor in tensors.items():
                    host[name][part].copy_(tensor, non_blocking=True)

    def _on_stream(self, device: torch.device) -> AbstractContextManager[Any]:
        """Copies of one device are in one stream: what is fetched in a step follows what was stored in the step before."""
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        context: AbstractContextManager[Any] = torch.cuda.stream(self._streams[device])
        return context

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies hold: streams are made again."""
        self.synchronize()
        return {"names": self.names, "_streams": {}}


def _on_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)
