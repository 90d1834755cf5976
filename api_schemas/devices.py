"""The published rates of GPUs, from their vendors' data sheets: what a step cannot be faster than."""

from typing import NamedTuple


class DeviceRates(NamedTuple):
    """flops: dense bf16 FLOP/s with sums in fp32. fp8: the same in FP8, as a multiple. memory, link: bytes/s.

    link: one direction of the fastest link to another GPU, NVLink where a card can have it, else PCIe.
    """

    flops: float
    fp8: float
    memory: float
    link: float


_NVLINK_3, _NVLINK_4, _NVLINK_5, _PCIE_4, _PCIE_5 = 300e9, 450e9, 900e9, 32e9, 64e9
DEVICES = {
    "GB200": DeviceRates(2500e12, 2, 8e12, _NVLINK_5),
    "B200": DeviceRates(2250e12, 2, 8e12, _NVLINK_5),
    "H200 NVL": DeviceRates(835.5e12, 2, 4.8e12, _NVLINK_4),
    "H200": DeviceRates(989.4e12, 2, 4.8e12, _NVLINK_4),
    "H100 80GB HBM3": DeviceRates(989.4e12, 2, 3.35e12, _NVLINK_4),
    "H100 SXM5": DeviceRates(989.4e12, 2, 3.35e12, _NVLINK_4),
    "GH200": DeviceRates(989.4e12, 2, 4.9e12, _NVLINK_4),
    "H100 NVL": DeviceRates(835.5e12, 2, 3.94e12, _NVLINK_3),
    "H100 PCIe": DeviceRates(756.5e12, 2, 2.04e12, _NVLINK_3),
    "A100": DeviceRates(312e12, 1, 2.04e12, _NVLINK_3),
    "L40S": DeviceRates(362e12, 2, 0.864e12, _PCIE_4),
    "L40": DeviceRates(181e12, 2, 0.864e12, _PCIE_4),
    "L4": DeviceRates(121e12, 2, 0.3e12, _PCIE_4),
    "RTX PRO 6000 Blackwell Workstation Edition": DeviceRates(503.8e12, 2, 1.792e12, _PCIE_5),
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": DeviceRates(438.9e12, 2, 1.792e12, _PCIE_5),
    "RTX 6000 Ada Generation": DeviceRates(364.2e12, 2, 0.96e12, _PCIE_4),
    "GeForce RTX 5090": DeviceRates(209.5e12, 2, 1.792e12, _PCIE_5),
    "GeForce RTX 5080": DeviceRates(112.6e12, 2, 0.96e12, _PCIE_5),
    "GeForce RTX 4090": DeviceRates(165.2e12, 2, 1.01e12, _PCIE_4),
}
"""By words of the device's name. GeForce cards add up in fp32 at half the rate that their sheets advertise. An A100
has no FP8."""
