"""Optimizer states in host memory: each parameter's are on its device only while the parameter is stepped.

On CUDA the host's copies are pinned. A stream brings the next parameter's states while the present one is stepped, and another
stream takes them back, since a bus copies in both directions at once (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840, with the
update on the device). The CPU runs the same code without streams. The numbers are those of a step without offload, bit for bit.
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


class _Streams(NamedTuple):
    """The two directions of copies between the host and one device."""

    to_device: torch.cuda.Stream
    to_host: torch.cuda.Stream


class HostStates:
    """Moves the named states of an optimizer's parameters between host and device."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._streams: dict[torch.device, _Streams] = {}

    def names_in(self, state: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the states that a parameter has; not each rule of an optimizer has all."""
        return tuple(name for name in self.names if name in state)

    def hold(self, state: dict[str, Any]) -> None:
        """Move one parameter's states to host memory, pinned if they come from CUDA."""
        for name in self.names_in(state):
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
            host: Parts = {name: state[name] for name in self.names_in(state)}
            state.update(current.parts)
            yield parameter, group
            current.parts.update({name: state[name] for name in self.names_in(state)})
            self._store(parameter.device, host, current.parts)
            state.update(host)

    def synchronize(self) -> None:
        """Wait until what is on its way to the host is there."""
        for streams in self._streams.values():
            streams.to_host.synchronize()

    def _fetch(self, parameter: Tensor, states: Mapping[Tensor, dict[str, Any]]) -> _Fetched:
        """Copy states to the device, after all that was stored so far.

        So the host has what the step before stored. Memory of this stream that is free again is what the last stores read,
        and no more than three parameters' states are on the device, however far the host is ahead.
        """
        device = parameter.device
        if device.type != "cuda":
            return _Fetched(self._copied_to(device, states[parameter]), None)
        if device not in self._streams:
            self._streams[device] = _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))
        to_device, to_host = self._streams[device]
        to_device.wait_stream(to_host)
        with torch.cuda.stream(to_device):
            parts = self._copied_to(device, states[parameter])
        return _Fetched(parts, to_device.record_event())

    def _copied_to(self, device: torch.device, state: dict[str, Any]) -> Parts:
        return {
            name: {part: host.to(device, copy=True, non_blocking=True) for part, host in state[name].items()}
            for name in self.names_in(state)
        }

    def _store(self, device: torch.device, host: Parts, parts: Parts) -> None:
        """Copy states to the host, after all that the device still does with them."""
        on_stream: AbstractContextManager[Any] = nullcontext()
        if device.type == "cuda":
            to_host = self._streams[device].to_host
            to_host.wait_stream(torch.cuda.current_stream(device))
            on_stream = torch.cuda.stream(to_host)
        with on_stream:
            for name, tensors in parts.items():
                for part, tensor in tensors.items():
                    host[name][part].copy_(tensor, non_blocking=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies hold: streams are made again."""
        self.synchronize()
        return {"names": self.names, "_streams": {}}


def _on_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)
