"""The catalog that a job chooses from: models, precision levels and pools."""

import statistics
from collections.abc import Sequence

from fastapi import APIRouter

from octet.api_schemas import JobState, Page, Pool
from octet.api_schemas.catalog import ModelFamily, model_families
from octet.api_schemas.levels import LEVELS, Level
from octet.service import store
from octet.service.deps import AppContextDep
from octet.service.http.pages import page_of
from octet.service.http.problems import answers

router = APIRouter(prefix="/v1", tags=["catalog"])

ENOUGH_JOBS = 10
"""A pool shows how much of its plans was measured once so many of its jobs have succeeded."""
_LIVE = [state for state in JobState if not state.is_terminal and state is not JobState.QUEUED]


@router.get("/models", operation_id="list_models", responses=answers(422))
def models() -> Page[ModelFamily]:
    """Every family of models, its presets and their bytes at each level."""
    families = model_families()
    return page_of(families, len(families), lambda family: family.family)


@router.get("/levels", operation_id="list_levels", responses=answers(422))
def levels() -> Page[Level]:
    """Every precision level: the formats in which it computes and stores."""
    return page_of(list(LEVELS.values()), len(LEVELS), lambda level: level.name)


def _median(ratios: Sequence[float]) -> float | None:
    return statistics.median(ratios) if len(ratios) >= ENOUGH_JOBS else None


@router.get("/pools", operation_id="list_pools", responses=answers(422))
def pools(context: AppContextDep) -> Page[Pool]:
    """Every pool, its slots and its queue."""
    with context.database.read() as session:
        present, used = store.queue.slots_present(session), store.queue.slots_used(session)
        jobs = store.tallies.read(session).jobs
        ratios = {pool.name: store.jobs.measured_to_planned(session, pool.name) for pool in context.settings.pools}
    shown = [
        Pool(
            name=pool.name,
            accelerator=pool.accelerator,
            slots=pool.slots,
            slots_present=present.get(pool.name),
            slots_used=used.get(pool.name, 0),
            jobs_queued=jobs.get((pool.name, JobState.QUEUED), 0),
            jobs_live=sum(jobs.get((pool.name, state), 0) for state in _LIVE),
            memory_per_device_bytes=pool.memory_per_device_bytes,
            threads_per_worker=pool.threads_per_worker,
            measured_to_planned=_median(ratios[pool.name][0]),
            step_time_to_planned=_median(ratios[pool.name][1]),
        )
        for pool in context.settings.pools
    ]
    return page_of(shown, len(shown), lambda pool: pool.name)
