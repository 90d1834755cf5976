"""Read a rank's collectives that have not ended from torch's flight recorder: on NCCL, those that wait on the device.

A rank that hangs in NCCL has often long started the collective that another rank never joins; its
Python code waits elsewhere. torch keeps the newest collectives of all groups in a ring. `Mesh` sets
the size of the ring before it makes groups of NCCL. Where the environment sets
TORCH_FR_BUFFER_SIZE, the ring has those of gloo as well.
"""

import json
import os
from typing import Any

from octet.worker.kernels.torch_private import flight_recorder_dumps

NUM_RECORDED = 512
NUM_SHOWN = 4
_SIZES = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
"""torch's variables for the size of the ring: the name that all versions read, and the newer one."""


def switch_on() -> None:
    """Let groups of NCCL that are made from now on record their collectives, unless the environment says otherwise."""
    if not any(name in os.environ for name in _SIZES):
        os.environ[_SIZES[0]] = str(NUM_RECORDED)


def read_unended() -> tuple[str, ...]:
    """Describe the oldest collectives of this process that have not ended. Empty where torch records nothing."""
    if all(os.environ.get(name, "0") == "0" for name in _SIZES):
        return ()
    found = flight_recorder_dumps()
    if not found:
        return ()
    try:
        return unended(found[0](True, False))  # with collectives, those that have ended as well
    except (KeyError, ValueError, RuntimeError) as error:  # the ranks agree on why they fail with or without it
        return (f"its dump cannot be read: {type(error).__name__}: {error}",)


def unended(dump: str | bytes) -> tuple[str, ...]:
    """Describe the oldest collectives that a dump shows as not ended. dump: JSON as torch writes it, version 2."""
    entries = [entry for entry in json.loads(dump).get("entries", []) if not entry["retired"] and entry["state"] != "completed"]
    entries.sort(key=lambda entry: entry["record_id"])
    return tuple(map(_describe, entries[:NUM_SHOWN]))


def _describe(entry: dict[str, Any]) -> str:
    """Describe one collective: its name, tensors, group and number, and whether the device has begun it."""
    tensors = ", ".join(f"{dtype} {sizes}" for dtype, sizes in zip(entry["input_dtypes"], entry["input_sizes"], strict=False))
    name, description = entry["process_group"]
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    return f"{entry['profiling_name']} of {tensors} in group {name} ({description}), number {number}, {entry['state']}"
