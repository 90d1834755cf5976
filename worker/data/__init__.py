"""Training input whose position fits in a checkpoint: one module for each source of `api_schemas/data/`, by its name."""

from importlib import import_module

from api_schemas import ANY_FILE, Files, SourceSpec
from worker.data.source import Batch, Source

__all__ = ["Batch", "Source", "open_source"]


def open_source(spec: SourceSpec, sequence_length: int, seed: int, files: Files = ANY_FILE) -> Source:
    """Open the source that a spec names. Raises DataError if a rank cannot read it or it holds too little."""
    module = import_module(f"worker.data.{spec.source}")
    source: Source = module.open_source(spec, sequence_length, seed, files)
    return source
