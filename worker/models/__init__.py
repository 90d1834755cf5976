"""The networks that Octet trains: one module for each family of `api_schemas/models/`, by its name."""

from importlib import import_module

from octet.api_schemas import ANY_FILE, FamilySpec, Files
from octet.worker.models.model import Losses, TrainedModel

__all__ = ["Losses", "TrainedModel", "build_model"]


def build_model(spec: FamilySpec, seed: int, files: Files = ANY_FILE) -> TrainedModel:
    """Build the network that a spec names, on the CPU in fp32. Initial values depend only on `seed`, or come from `files`."""
    model: TrainedModel = import_module(f"octet.worker.models.{spec.family}").build(spec, seed, files)
    return model
