"""Save and continue a loop of one's own with the checkpoints of jobs: each rank writes what it holds, any layout reads it."""

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from octet.api_schemas import CheckpointRef
from octet.worker.checkpoint import BadCheckpoint, complete_in, load_together, save
from octet.worker.checkpoint.resume import random_state, resume, set_random_state
from octet.worker.mesh import Axis
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
    Raises on all ranks if one of them cannot write: there its own error, StorageFull for a full disk, elsewhere OSError.
    """
    world = parallel.axes.world
    model, optimizer = parallel.state_dicts()
    state = {"model": model, "optimizer": optimizer, "random": random_state(world), _EXTRA: extra or {}}
    failure: Exception | None = None
    try:
        save(Path(folder), step, state, world)
    except Exception as error:  # noqa: BLE001  raised below, when the ranks that write nothing know of it
        failure = error
    [num_failed] = world.sum(float(failure is not None))
    if failure is not None:
        raise failure
    if num_failed:
        raise OSError(f"another rank could not write the checkpoint of step {step} to {folder}; its own error has the reason")


def load_checkpoint(parallel: Parallel, folder: str | Path) -> LoadedCheckpoint | None:
    """Continue from the newest checkpoint in a folder that passes its check; returns None if the folder has none.

    All ranks call it together, after `octet.parallelize` of a model of the same network. Number of ranks, degrees, ZeRO stage
    and level may be others than those that saved it. With the same it continues to the bit, random numbers included. A rank
    reads the weights block by block. A checkpoint that is damaged is passed over with a warning.
    Raises ValueError for another network or another optimizer, and BadCheckpoint if every checkpoint is damaged.
    """
    world = parallel.axes.world
    damaged: BadCheckpoint | None = None
    for ref in _found_by_first(Path(folder), world):
        try:
            state = load_together(Path(folder), ref, world, parallel.axes.tensor)
        except BadCheckpoint as error:
            warnings.warn(f"{error}; trying the checkpoint before", stacklevel=2)
            damaged = damaged or error
            continue
        own = parallel.own_part(state["model"], state["optimizer"])
        resume(parallel.model, parallel.optimizer, *own, dtypes=parallel.dtypes())
        set_random_state(state["random"], world)
        return LoadedCheckpoint(ref.step, state.get(_EXTRA, {}))
    if damaged is not None:
        raise BadCheckpoint(f"no checkpoint in {folder} can be read, the newest because {damaged}. Name another folder.")
    return None


def _found_by_first(folder: Path, world: Axis) -> list[CheckpointRef]:
    """List the checkpoints that the first rank sees. Another rank may see a shared folder a moment later."""
    seen = [ref.model_dump(mode="json") for ref in complete_in(folder)] if world.is_first else []
    return [CheckpointRef.model_validate(ref) for ref in json.loads(world.gather_texts(json.dumps(seen))[0])]
