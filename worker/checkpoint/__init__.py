"""Checkpoints: plain tensors in safetensors, everything else in JSON, and a manifest written last.

A checkpoint is a folder `step_0000000100` with `tensors.safetensors`, `state.json` and `manifest.json`. Tensors that ranks hold
in pieces (`TensorInPieces`) are in one more file for each rank, `rank_00003.safetensors`, which that rank writes; `state.json`
places each piece, so any number of ranks can read them. The folder is written under another name, synced to disk
and then renamed, so a folder with this name is complete. The manifest lists the size and SHA-256 of each file. The control
plane keeps the hash of the manifest, and a resume checks it first.

Training goes on while a checkpoint is written (`writer.py`).
"""

from octet.worker.checkpoint.files import SavedCheckpoint, checkpoint_name
from octet.worker.checkpoint.read import BadCheckpoint, complete_in, load, load_folder, load_together
from octet.worker.checkpoint.writer import CheckpointWriter, save

__all__ = [
    "BadCheckpoint",
    "CheckpointWriter",
    "SavedCheckpoint",
    "checkpoint_name",
    "complete_in",
    "load",
    "load_folder",
    "load_together",
    "save",
]
