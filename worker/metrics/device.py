"""Readings of a rank's device: memory in use and at its peak; on CUDA also power, clock and temperature from NVML.

Read when Prometheus scrapes, not by the training loop.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from octet.api_schemas import EventReport
from octet.api_schemas.devices import DEVICES

Readings = Iterator[tuple[str, float]]

_OTHER_CARDS = ("MIG", "Laptop", "D")
"""Words after which a name is of another card: a slice of a GPU, or a smaller chip."""


def device_readings(device: torch.device) -> Callable[[], Readings]:
    """Return the function to call at each scrape; it yields names of `octet.worker.metrics.table` families and their values."""
    if device.type == "cpu":
        return _read_process
    gpu = _open_nvml(device)
    return lambda: _read_cuda(device, gpu)


def bf16_peak(device: torch.device) -> float | None:
    """Return the device's peak in dense bf16 FLOP/s; None if it is not known."""
    if device.type == "cpu":
        return None
    words = torch.cuda.get_device_name(device).split()
    if set(words) & set(_OTHER_CARDS):
        return None
    name = f" {' '.join(words)} ".replace("-", " ")
    parts = [part for part in DEVICES if f" {part.replace('-', ' ')} " in name]
    return DEVICES[max(parts, key=len)].flops if parts else None


def no_peak_event(device: torch.device) -> EventReport | None:
    """Return the event for a GPU whose utilization nobody can compute; None for the CPU, and for a GPU with a known peak."""
    if device.type == "cpu" or bf16_peak(device) is not None:
        return None
    message = (
        f"octet_train_flops_utilization_ratio is left out: no bf16 peak is known for {torch.cuda.get_device_name(device)}; "
        f"known: {', '.join(DEVICES)}. Add its dense bf16 FLOP/s to DEVICES in api_schemas/devices.py."
    )
    return EventReport(type="device.unknown_peak", message=message)


def _read_process() -> Readings:
    """Read this process's resident memory, and its memory limit: the smaller of control group and machine."""
    status = Path("/proc/self/status").read_text()
    yield "octet_memory_used_bytes", _kilobytes(status, "VmRSS")
    yield "octet_memory_peak_bytes", _kilobytes(status, "VmHWM")
    limit = Path("/sys/fs/cgroup/memory.max")
    own = limit.read_text().strip() if limit.exists() else "max"
    machine = _kilobytes(Path("/proc/meminfo").read_text(), "MemTotal")
    yield "octet_memory_limit_bytes", machine if own == "max" else min(machine, float(own))


def _read_cuda(device: torch.device, gpu: Any | None) -> Readings:
    num_free, num_bytes = torch.cuda.mem_get_info(device)
    yield "octet_memory_used_bytes", num_bytes - num_free
    yield "octet_memory_peak_bytes", torch.cuda.max_memory_allocated(device)
    yield "octet_memory_limit_bytes", num_bytes
    if gpu is not None:
        yield from _read_nvml(gpu)


def _read_nvml(gpu: Any) -> Readings:
    """Read those NVML values that this GPU supports. A MIG slice, for one, has no utilization of its own."""
    import pynvml

    readings: dict[str, Callable[[], float]] = {
        "octet_gpu_power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
        "octet_gpu_sm_clock_hertz": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) * 1e6,
        "octet_gpu_temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        "octet_gpu_utilization_ratio": lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    }
    for name, read in readings.items():
        with suppress(pynvml.NVMLError):
            yield name, read()


def _open_nvml(device: torch.device) -> Any | None:
    """Open the device in NVML. Returns None if package or library are missing; torch's own readings remain."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None


def _kilobytes(text: str, name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None, name
    return int(found[1]) * 1024.0
