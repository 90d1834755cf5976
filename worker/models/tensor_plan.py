"""The plans of transformers for tensor parallelism, `base_model_tp_plan`, in our words."""

from collections.abc import Mapping
from typing import Any

from worker.models.model import TensorRole

ROLES: Mapping[str, TensorRole] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "partial-gradients",
}


def plan_of_transformers(network: Any, prefix: str, *, with_vocabulary: bool) -> dict[str, TensorRole]:
    """Return the roles of a network's layers, empty where transformers has no plan that we know.

    prefix: begins the network's names in the model. with_vocabulary: embedding and head are divided by tokens.
    """
    named: Mapping[str, str] = getattr(network.config, "base_model_tp_plan", None) or {}
    if not named or not set(named.values()) <= set(ROLES):
        return {}
    base = f"{prefix}{network.base_model_prefix}."
    plan = {f"{base}{glob}": ROLES[style] for glob, style in named.items()}
    ends: dict[Any, TensorRole] = {network.get_input_embeddings(): "embedding", network.get_output_embeddings(): "head"}
    if with_vocabulary and None not in ends:
        names = {module: name for name, module in network.named_modules()}
        plan |= {f"{prefix}{names[module]}": role for module, role in ends.items()}
    return plan
