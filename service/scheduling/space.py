"""Measures the space that is free where the jobs' checkpoints are. The decision about it is in `decide.py`."""

import shutil
from collections.abc import Iterable

from octet.api_schemas import FailureReason
from octet.service.scheduling.decide import Queued, Space
from octet.service.settings import Settings


def space_for(queue: Iterable[Queued], settings: Settings) -> Space | None:
    """Measure the file system of the data folder. None if no job waits for space, or if this process has no such folder."""
    if all(job.former_reason is not FailureReason.STORAGE_FULL for job in queue):
        return None
    try:
        return Space(shutil.disk_usage(settings.data_dir).free, settings.free_space_bytes)
    except OSError:
        return None
