"""Say why PyTorch finds no CUDA device on a node: its build, the driver, or the devices.

A driver serves every CUDA release of its own major version and the older ones (NVIDIA's minor version compatibility), and none
of a newer major version. NVML belongs to the driver, so it answers where PyTorch cannot start.
"""

from collections.abc import Sequence

import torch

IMAGE_LINES = {"cu126": (12, 6), "cu129": (12, 9), "cu130": (13, 0)}
"""CUDA releases that the image of a GPU node is built for (deploy/docker/torch), oldest first."""
OLDEST_DRIVER = {12: 525, 13: 580}
"""Branch of the oldest Linux driver that serves a CUDA major version, from the CUDA toolkit's release notes."""


def why_no_device() -> str:
    """Return one or two sentences: what is wrong on this node, and what to change. Call it where PyTorch sees no device."""
    built_for = torch.version.cuda
    if built_for is None:
        return f"PyTorch {torch.__version__} is a build without CUDA. Use the image of GPU nodes, octet/node-cuda."
    driver = read_driver()
    if driver is None:
        return "this node has no NVIDIA driver. Correct the node's label or the pool, or install driver and container toolkit."
    name, cuda, num_devices = driver
    needed = _release(built_for)
    if cuda[0] < needed[0]:
        return (
            f"driver {name} is too old for CUDA {built_for}: it serves CUDA {cuda[0]}.{cuda[1]} and needs to be "
            f"{OLDEST_DRIVER.get(needed[0], 'a later one')} or later. {_advice(cuda)}"
        )
    if num_devices == 0:
        return f"driver {name} serves CUDA {cuda[0]}.{cuda[1]} and has no device here. Correct the node's label or the pool."
    return (
        f"driver {name} has {num_devices} devices and PyTorch sees none. Look at CUDA_VISIBLE_DEVICES, at the devices that "
        "the container is given, and at `nvidia-smi` on the node."
    )


def image_line(cuda: Sequence[int]) -> str | None:
    """Return the newest image line that a driver for this CUDA release serves; None where it serves none.

    A line of the same major version that is newer than the driver's release works too: the oldest of them is the last
    resort.
    """
    served = [line for line, release in IMAGE_LINES.items() if release <= tuple(cuda)]
    same_major = [line for line, release in IMAGE_LINES.items() if release[0] == cuda[0]]
    return (served[-1:] or same_major[:1] or [None])[0]


def _advice(cuda: tuple[int, int]) -> str:
    line = image_line(cuda)
    oldest = min(OLDEST_DRIVER.values())
    return f"Use image octet/node-cuda:…-{line}, or update the driver." if line else f"Update the driver to {oldest} or later."


def _release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def read_driver() -> tuple[str, tuple[int, int], int] | None:
    """Return the driver's version, the CUDA release that it serves, and its number of devices; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # the library comes with the driver
        return None
    try:
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        name = pynvml.nvmlSystemGetDriverVersion()
        return name, (number // 1000, number % 1000 // 10), pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
