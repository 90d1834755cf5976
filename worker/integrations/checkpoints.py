"""Save and continue a loop of one's own with the checkpoints of jobs: each rank writes what it holds, any layout reads it."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

from octet.worker.checkpoint import BadCheckpoint, complete_in, load_together, save
from octet.worker.checkpoint.random_state import random_state, set_random_state
from octet.worker.checkpoint.resume import resume
from octet.worker.parallel import Parallel

_EXTRA = "extra"


class LoadedCheckpoint(NamedTuple):
    """The step of a checkpoint, and what a loop has saved with it."""

    step: int
    extra: dict[str, Any]


def save_checkpoint(parallel: Parallel, folder: str | Path, step: int, extra: dict[str, Any] | None = None) -> None:
    """Write the model and the optimizer of `octet.parallelize` as `folder/step_0000000100`, and wait for it.

    All ranks call it together, between steps, with one folder that all of them see. No rank puts the model together. A folder
    of this name is complete and every byte of it has a SHA-256; a checkpoint of the same step is replaced.
    extra: nested dicts and lists of tensors and JSON values, of the first rank; a schedule's state dict, a data position.
    Raises OSError or StorageFull, on all ranks, if one of them cannot write.
    """
    world = parallel.axes.world
    model, optimizer = parallel.state_dicts()
    state = {"model": model, "optimizer": optimizer, "random": random_state(world), _EXTRA: extra or {}}
    save(Path(folder), step, state, world)


def load_checkpoint(parallel: Parallel, folder: str | Path) -> LoadedCheckpoint | None:
    """Continue from the newest checkpoint in a folder that passes its check; returns None if there is none.

    All ranks call it together, after `octet.parallelize` of a model of the same network. Number of ranks, degrees, ZeRO stage
    and level may be others than those that saved it. With the same it continues to the bit, random numbers included. A rank
    reads the weights block by block. A checkpoint that is damaged is passed over with a warning.
    Raises ValueError for another network or another optimizer.
    """
    world = parallel.axes.world
    for ref in complete_in(Path(folder)):
        try:
            state = load_together(Path(folder), ref, world, parallel.axes.tensor)
        except BadCheckpoint as error:
            warnings.warn(f"{error}; trying the checkpoint before", stacklevel=2)
            continue
        own = parallel.own_part(state["model"], state["optimizer"])
        resume(parallel.model, parallel.optimizer, *own, dtypes=parallel.dtypes())
        set_random_state(state["random"], world)
        return LoadedCheckpoint(ref.step, state.get(_EXTRA, {}))
    return None
