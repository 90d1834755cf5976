"""Other people's training loops: transformers' Trainer, loops that save models as values, and checkpoints of one's own loop."""

from octet.worker.integrations.carry import carry_model_state
from octet.worker.integrations.checkpoints import LoadedCheckpoint, load_checkpoint, save_checkpoint
from octet.worker.integrations.transformers import OctetArguments, prepare_trainer

__all__ = [
    "LoadedCheckpoint",
    "OctetArguments",
    "carry_model_state",
    "load_checkpoint",
    "prepare_trainer",
    "save_checkpoint",
]
