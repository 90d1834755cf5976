"""A RoBERTa: transformers' RobertaForMaskedLM in the sizes of the contract. Values are drawn as transformers draws them."""

from typing import Any

from octet.api_schemas import ANY_FILE, Files
from octet.api_schemas.models.roberta import POSITIONS_BEFORE_FIRST, RobertaSizes, RobertaSpec
from octet.worker.models.huggingface import from_random_values, make_config
from octet.worker.models.model import TrainedModel
from octet.worker.models.wrapped import wrap


def build(spec: RobertaSpec, seed: int, _files: Files = ANY_FILE) -> TrainedModel:
    """Build the RoBERTa that a job asks for, with random values."""
    return wrap(from_random_values(config_of(spec.sizes), "masked_token", seed), "masked_token")


def config_of(sizes: RobertaSizes) -> Any:
    """Return the configuration of transformers with these sizes."""
    fields = {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_sequence_length + POSITIONS_BEFORE_FIRST,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": POSITIONS_BEFORE_FIRST - 1,
    }
    return make_config("roberta", fields)
