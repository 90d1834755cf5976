"""Look at this machine and at its server, for `octet doctor`: packages, devices, the server, its pools and alerts, ports, disk.

The client loads no torch. A process of its own asks torch for its devices, because a driver that torch cannot use looks well
to `nvidia-smi`.
"""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from octet.api_schemas import Contract
from octet.client.api import Client
from octet.client.errors import ApiError, OctetError
from octet.client.text import num_bytes, plans_held

Standing = Literal["ok", "note", "bad"]

PACKAGES = {
    "service": ("fastapi", "ray", "sqlalchemy", "uvicorn", "psycopg"),
    "worker": ("torch", "numpy", "safetensors"),
    "models": ("transformers",),
    "ao": ("torchao",),
    "datasets": ("datasets",),
}
"""The packages that stand for each extra."""
PORTS = {8000: "octet serve", 3000: "Grafana of the compose stack", 9090: "Prometheus of the compose stack"}
LEAST_FREE_BYTES = 1 << 30
"""The server starts no job whose disk was full before that much is free again (`free_space_bytes`)."""
LEAST_SHARED_BYTES = 1 << 30
_LONGEST_S = 60

ASK_TORCH = """
import json, torch
cuda = torch.cuda
found = [(cuda.get_device_name(n), cuda.get_device_capability(n)) for n in range(cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "devices": found}))
"""
"""The program that a Python with torch runs."""
_SMI = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]


class Check(Contract):
    """One thing that was looked at. `hint` says what to do, unless it is well."""

    part: str
    standing: Standing
    found: str
    hint: str | None = None


class Checkup(Contract):
    """Everything that was looked at, in the order in which it is shown."""

    object: Literal["checkup"] = "checkup"
    checks: tuple[Check, ...]

    @property
    def is_well(self) -> bool:
        return all(check.standing != "bad" for check in self.checks)


def check_machine(client: Client, data_dir: Path) -> Checkup:
    """Look at everything. data_dir: where a server of this folder keeps its data."""
    server, is_up = _server(client)
    ports = _ports(urlsplit(client.url).port or 80, is_up)
    return Checkup(checks=(*_software(), *_devices(), *server, *ports, *_disks(data_dir)))


def _software() -> Iterator[Check]:
    system = f"Python {platform.python_version()} at {sys.executable}, {platform.platform()}"
    yield Check(part="octet", standing="ok", found=f"{version('octet-fp8')}, {system}")
    for extra, packages in PACKAGES.items():
        found = {package: _version(package) for package in packages}
        missing = [package for package, has in found.items() if has is None]
        words = ", ".join(f"{package} {has}" for package, has in found.items() if has)
        if missing:
            words = f"{words}; missing: {', '.join(missing)}" if words else f"not installed ({', '.join(missing)})"
        hint = f"pip install 'octet-fp8[{extra}]', if you need it" if missing else None
        yield Check(part=f"extra {extra}", standing="note" if missing else "ok", found=words, hint=hint)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[Check]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Check(part="processors", standing="ok", found=f"{os.cpu_count()}, {num_bytes(memory)} of memory")
    gpus = _output(_SMI) if shutil.which(_SMI[0]) else None
    if gpus is None:
        yield Check(part="driver", standing="note", found="no nvidia-smi that answers: no NVIDIA GPU is used")
    for line in (gpus or "").splitlines():
        name, size, driver, capability = (word.strip() for word in line.split(","))
        yield Check(part="driver", standing="ok", found=f"{driver}: {name}, {size}, compute capability {capability}")
    if _version("torch") is not None:
        yield _torch(has_gpu=bool(gpus))


def _torch(*, has_gpu: bool) -> Check:
    """Ask torch itself, which takes seconds."""
    answer = _output([sys.executable, "-c", ASK_TORCH])
    if answer is None:
        change = "Run: python -c 'import torch'. It shows why; install torch again."
        return Check(part="torch", standing="bad", found="cannot be imported", hint=change)
    told = json.loads(answer)
    build = f"built for CUDA {told['cuda']}" if told["cuda"] else "built for CPUs"
    devices = ", ".join(f"{name} ({major}.{minor})" for name, (major, minor) in told["devices"])
    if devices:
        old = [name for name, capability in told["devices"] if tuple(capability) < (8, 9)]
        hint = f"{', '.join(old)}: FP8 instructions need compute capability 8.9. FP8 levels run there without." if old else None
        return Check(part="torch", standing="note" if old else "ok", found=f"{build}, sees {devices}", hint=hint)
    if has_gpu:
        change = "Install a driver that supports this CUDA" if told["cuda"] else "Install torch's build for CUDA"
        return Check(part="torch", standing="bad", found=f"{build}, sees no GPU though the driver does", hint=f"{change}.")
    return Check(part="torch", standing="ok", found=f"{build}, sees no GPU: jobs run on the CPUs")


def _output(command: list[str]) -> str | None:
    """Return what a program prints; None if it fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()


def _server(client: Client) -> tuple[list[Check], bool]:
    """Look at the server and its pools. Return True too if one answers."""
    try:
        pools, alerts = list(client.pools()), client.find_alerts()
    except OctetError as error:
        reason, _, hint = str(error).partition("\n")
        is_up = isinstance(error, ApiError)
        standing: Standing = "bad" if is_up else "note"
        return [Check(part="server", standing=standing, found=reason, hint=hint or None)], is_up
    missing = client.why_not_ready()
    checks = [
        Check(part="server", standing="ok", found=f"{client.url} takes jobs and runs them")
        if missing is None
        else Check(part="server", standing="bad", found=f"{client.url} is not ready", hint=missing)
    ]
    for pool in pools:
        found = f"{pool.accelerator}, {pool.slots_used} of {pool.slots} slots used, {pool.jobs_live} jobs live, "
        found += f"{pool.jobs_queued} queued"
        found += f"; {held}" if (held := plans_held(pool)) else ""
        if pool.slots_present is None or pool.slots_present >= pool.slots:
            checks.append(Check(part=f"pool {pool.name}", standing="ok", found=found))
            continue
        hint = "start nodes, or correct the pool's slots: a job that needs more than nodes offer waits"
        found += f"; nodes offer {pool.slots_present}"
        checks.append(Check(part=f"pool {pool.name}", standing="note", found=found, hint=hint))
    if alerts is None:
        checks.append(Check(part="alert", standing="note", found="the server is older than this client, and lists no alerts"))
    for alert in alerts or ():
        weight: Standing = "bad" if alert.severity == "critical" else "note"
        checks.append(Check(part="alert", standing=weight, found=f"{alert.name}: {alert.summary}", hint=f"See {alert.runbook}"))
    return checks, True


def _ports(server_port: int, is_up: bool) -> Iterator[Check]:
    for port, use in ({server_port: "octet serve"} | PORTS).items():
        if is_up and port == server_port:
            yield Check(part=f"port {port}", standing="ok", found="the server's")
            continue
        with socket.socket() as probe:
            probe.settimeout(1)
            is_taken = probe.connect_ex(("127.0.0.1", port)) == 0
        hint = f"{use} needs another port while that program runs" if is_taken and port in (8000, server_port) else None
        found = "taken" if is_taken else "free"
        yield Check(part=f"port {port}", standing="note" if hint else "ok", found=f"{found}, for {use}", hint=hint)


def _disks(data_dir: Path) -> Iterator[Check]:
    folder = next(place for place in (data_dir.resolve(), *data_dir.resolve().parents) if place.exists())
    for part, place, needs in (
        ("disk", folder, LEAST_FREE_BYTES),
        ("disk of Ray", Path(tempfile.gettempdir()), LEAST_FREE_BYTES),
        ("shared memory", Path("/dev/shm"), LEAST_SHARED_BYTES),
    ):
        if not place.exists():
            continue
        usage = shutil.disk_usage(place)
        is_full = usage.free < needs
        hint = f"Free some: less than {num_bytes(needs)} is left" if is_full else None
        found = f"{num_bytes(usage.free)} of {num_bytes(usage.total)} free at {place}"
        yield Check(part=part, standing="bad" if is_full else "ok", found=found, hint=hint)
