"""Other people's training loops: what `initialize` needs inside transformers' Trainer and loops that save models as values."""

from octet.worker.integrations.carry import carry_model_state
from octet.worker.integrations.transformers import OctetArguments, prepare_trainer

__all__ = ["OctetArguments", "carry_model_state", "prepare_trainer"]
