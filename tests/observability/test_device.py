"""Readings of a device: real ones on the CPU; on a GPU, with torch and NVML replaced, since the machine has none."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from octet.worker.metrics.device import bf16_peak, device_readings, no_peak_event
from octet.worker.metrics.table import FAMILIES, Metrics
from octet.worker.train import reports

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class NVMLError(Exception):
    pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Replace torch and NVML by what they answer on an H200. The units are NVML's own: mW, MHz, percent."""
    nvml = ModuleType("pynvml")
    answers = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetPowerUsage": lambda gpu: 412_500,
        "nvmlDeviceGetClockInfo": lambda gpu, kind: {1: 1980}[kind],
        "nvmlDeviceGetTemperature": lambda gpu, kind: {0: 61}[kind],
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=97),
    }
    for name, answer in answers.items():
        setattr(nvml, name, answer)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 100))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    return nvml


def test_the_cpu_tells_this_process() -> None:
    held = bytearray(64 << 20)
    readings = dict(device_readings(CPU)())
    assert len(held) < readings["octet_memory_used_bytes"] <= readings["octet_memory_peak_bytes"]
    assert readings["octet_memory_peak_bytes"] < readings["octet_memory_limit_bytes"]
    assert bf16_peak(CPU) is None


def test_a_gpu_tells_base_units(cuda: ModuleType) -> None:
    assert dict(device_readings(CUDA)()) == {
        "octet_memory_used_bytes": 60,
        "octet_memory_peak_bytes": 70,
        "octet_memory_limit_bytes": 100,
        "octet_gpu_power_watts": 412.5,
        "octet_gpu_sm_clock_hertz": 1.98e9,
        "octet_gpu_temperature_celsius": 61,
        "octet_gpu_utilization_ratio": 0.97,
    }
    assert bf16_peak(CUDA) == 989.4e12


PEAKS = {
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 438.9e12,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": None,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA H20": None,
}


@pytest.mark.parametrize("name", PEAKS)
def test_a_card_has_its_own_peak_or_says_that_none_is_known(
    name: str, cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert bf16_peak(CUDA) == PEAKS[name]
    event = no_peak_event(CUDA)
    assert (event is None) == (PEAKS[name] is not None)
    if event is not None:
        assert event.type == "device.unknown_peak"
        assert f"no bf16 peak is known for {name}; known: GB200, B200" in event.message


def test_the_cpu_is_no_card_without_a_peak() -> None:
    assert no_peak_event(CPU) is None


def test_a_job_says_once_that_its_card_has_no_peak(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H20")
    monkeypatch.setattr(reports, "conversion_events", lambda *_: ())
    monkeypatch.setattr(reports, "compile_events", lambda *_: ())
    job = SimpleNamespace(conversion=None, model=None, graph=SimpleNamespace(start_events=lambda: ()))
    events = reports.start_events(None, job, CUDA)  # type: ignore[arg-type]
    assert [event.type for event in events] == ["device.unknown_peak"]


def test_without_nvml_torch_still_tells_the_memory(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NVMLError("the driver is not loaded")

    monkeypatch.setattr(cuda, "nvmlInit", refuse)
    assert set(dict(device_readings(CUDA)())) == {
        "octet_memory_used_bytes", "octet_memory_peak_bytes", "octet_memory_limit_bytes",
    }  # fmt: skip


def test_readings_that_a_gpu_does_not_support_are_left_out(cuda: ModuleType) -> None:
    def refuse(gpu: str) -> None:
        raise NVMLError("not supported")

    cuda.nvmlDeviceGetUtilizationRates = refuse
    names = set(dict(device_readings(CUDA)()))
    assert "octet_gpu_power_watts" in names
    assert "octet_gpu_utilization_ratio" not in names


def test_readings_are_taken_at_each_scrape_and_are_in_the_table(cuda: ModuleType) -> None:
    metrics = Metrics()
    metrics.describe_device(device_readings(CUDA), bf16_peak(CUDA))
    assert {family.name for family, _, _ in metrics.read()} <= {family.name for family in FAMILIES}
    cuda.nvmlDeviceGetPowerUsage = lambda gpu: 100_000
    assert {family.name: value for family, _, value in metrics.read()}["octet_gpu_power_watts"] == 100
