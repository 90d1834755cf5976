"""Input with a position that a checkpoint can hold: one module for each source of `api_schemas/data/`, by its name."""

from importlib import import_module

from api_schemas import SourceSpec
from worker.data.source import Batch, Source

__all__ = ["Batch", "Source", "open_source"]


def open_source(spec: SourceSpec, sequence_length: int, seed: int) -> Source:
    """Open what a spec names. Raises DataError where a rank cannot read it, or there is too little of it."""
    module = import_module(f"worker.data.{spec.source}")
    source: Source = module.open_source(spec, sequence_length, seed)
    return source
