"""Install PyTorch into this Python's environment: the CPU build where the machine has no NVIDIA device, else pip's.

The first step of `make install` and `make demo`. On Linux, PyPI's PyTorch is the CUDA build, four times as large.
PyTorch has an index of its own for the CPU build, and uv knows its address. If it does not answer, pip installs torch
from its own indexes.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CPU_SIZES = "PyTorch's CPU build and Triton: about 390 MB to download; .venv then takes 2.1 GB"
CUDA_SIZES = "PyPI's build for Linux is the CUDA one: about 3 GB to download; .venv then takes 5.7 GB"
DRIVER = Path("/proc/driver/nvidia/version")
UV_SETTINGS = {"UV_HTTP_TIMEOUT": "15", "UV_HTTP_RETRIES": "1"}
"""Wait so long and ask so often for an index that does not answer; the user's own settings win."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and install."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--constraints", type=Path, required=True, help="file with the versions of torch and uv")
    parser.add_argument("--index-url", default="", help="index to take torch from; empty: choose by the machine")
    options = parser.parse_args(arguments)
    versions = pinned(options.constraints)
    if installed_version("torch") == versions["torch"]:
        return
    torch = f"torch=={versions['torch']}"
    if options.index_url:
        say(f"Installing {torch} from {options.index_url}.")
        pip("--no-deps", "--index-url", options.index_url, torch)
        return
    if platform.system() != "Linux":
        say(f"Installing {torch}.")
    elif has_nvidia_device():
        say(f"Installing {torch} for this machine's NVIDIA device. {CUDA_SIZES}.")
    elif install_cpu_build(torch, f"uv=={versions['uv']}"):
        return
    else:
        say(f"PyTorch's CPU index does not answer. Installing {torch} from pip's indexes. {CUDA_SIZES}.")
    pip("--no-deps", torch)


def pinned(constraints: Path) -> dict[str, str]:
    """Return the version of each package that a constraints file pins."""
    lines = [line.partition("==") for line in constraints.read_text().splitlines() if not line.startswith("#")]
    return {name: version for name, equals, version in lines if equals}


def installed_version(package: str) -> str:
    """Return the installed version without its local part, or an empty string."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def has_nvidia_device() -> bool:
    """Return True if NVIDIA's driver is loaded, or its tool is there, as under Windows' Linux."""
    return DRIVER.exists() or shutil.which("nvidia-smi") is not None


def install_cpu_build(torch: str, uv: str) -> bool:
    """Install the CPU build from PyTorch's own index. Return False if that is not to be had."""
    say(f"No NVIDIA device here. Installing {torch}. {CPU_SIZES}.")
    pip(uv)
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--no-deps", "--torch-backend", "cpu"]
    return subprocess.run([*command, torch], check=False, env=UV_SETTINGS | os.environ).returncode == 0


def pip(*arguments: str) -> None:
    """Run `pip install`; on a terminal it shows what it downloads, with sizes and progress."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "install", *quiet, "--disable-pip-version-check", *arguments]
    answer = subprocess.run(command, check=False)
    if answer.returncode:
        raise SystemExit(answer.returncode)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
