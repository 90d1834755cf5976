"""The plans of transformers for tensor parallelism, `base_model_tp_plan`, in our words."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from octet.worker.models.model import TensorRole

ROLES: Mapping[str, TensorRole] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "partial-gradients",
}


def plan_of_transformers(network: Any, prefix: str, *, with_vocabulary: bool) -> dict[str, TensorRole]:
    """Return the roles of a network's layers, empty where transformers has no plan that we know.

    prefix: begins the network's names in the model. with_vocabulary: embedding and head are divided by tokens.
    """
    base = f"{prefix}{network.base_model_prefix}."
    modules = {module: f"{prefix}{name}" for name, module in network.named_modules()}
    ends: dict[Any, TensorRole] = {network.get_input_embeddings(): "embedding", network.get_output_embeddings(): "head"}
    ends.pop(None, None)
    own_names = {modules[module]: role for module, role in ends.items()}
    named: Mapping[str, str] = getattr(network.config, "base_model_tp_plan", None) or {}
    styles = {f"{base}{glob}": style for glob, style in named.items()}
    # Where the head is tied, transformers adds the embedding to the plan, in a style of its own.
    styles = {glob: style for glob, style in styles.items() if not any(fnmatchcase(name, glob) for name in own_names)}
    if not styles or not set(styles.values()) <= set(ROLES):
        return {}
    plan = {glob: ROLES[style] for glob, style in styles.items()}
    return plan | own_names if with_vocabulary and len(own_names) == 2 else plan
