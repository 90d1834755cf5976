"""The plan of tensor parallelism: a role for each divided layer of a model, by globs of names, and the cuts that follow.

A column layer is cut by outputs, a row layer by inputs, an embedding and a head by tokens of the vocabulary. The plan is that
of a family (`tensor_plan`), of transformers (`base_model_tp_plan`), or of a caller.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, get_args

from torch import nn

from octet.worker.fp8.bf16 import HalfLinear
from octet.worker.fp8.layout import layout_of
from octet.worker.fp8.linear import Float8Linear
from octet.worker.mesh import Cut
from octet.worker.models.model import TensorRole, TrainedModel
from octet.worker.models.wrapped import plan_of_transformers

Plan = Mapping[str, TensorRole]


def plan_of(model: nn.Module, own: Mapping[str, str] | None = None) -> Plan:
    """Return the caller's own plan, or else that of a family or of transformers. Raises ValueError where there is none.

    Without our loss, which needs no whole logits, the embedding and the head stay whole.
    """
    if own is not None:
        roles = get_args(TensorRole)
        if wrong := [f"{glob}: {role!r}" for glob, role in own.items() if role not in roles]:
            raise ValueError(f"the plan has {wrong[0]}; allowed: {', '.join(roles)}. Change the plan.")
        return own  # type: ignore[return-value]
    plan: Plan = {}
    if isinstance(model, TrainedModel):
        plan = model.tensor_plan
    elif hasattr(model, "base_model_prefix"):
        network: Any = model
        plan = plan_of_transformers(network, "", with_vocabulary=False)
    if not plan:
        raise ValueError(
            f"{type(model).__name__} has no plan for a tensor degree; allowed: gpt, llama, models of transformers with a "
            'base_model_tp_plan, or a plan of your own. Pass plan={"blocks.*.up": "column", "blocks.*.down": "row"}.'
        )
    return plan


def held_part(plan: Plan, model: nn.Module) -> Plan:
    """Return the part of a whole model's plan that is about modules which this rank's stages have."""
    names = [name for name, _ in model.named_modules()]
    return {glob: role for glob, role in plan.items() if any(fnmatchcase(name, glob) for name in names)}


def roles_of(model: nn.Module, plan: Plan) -> dict[str, TensorRole]:
    """Return the role of each module of the plan, by name. Raises ValueError for a glob that matches nothing."""
    names = [name for name, _ in model.named_modules()]
    roles = {name: role for glob, role in plan.items() for name in names if fnmatchcase(name, glob)}
    if unmatched := [glob for glob in plan if not any(fnmatchcase(name, glob) for name in names)]:
        raise ValueError(f"the plan's {unmatched[0]!r} matches no module of the model. Correct the glob, or leave it out.")
    return roles


def cuts_of(module: nn.Module, name: str, role: TensorRole, num_shards: int) -> dict[str, Cut]:
    """Return the cuts of a module's parameters, by their names in it. Raises ValueError for what cannot be cut."""
    is_embedding = isinstance(module, nn.Embedding)
    is_linear = isinstance(module, (Float8Linear, HalfLinear)) or layout_of(module) is not None
    if not (is_embedding if role == "embedding" else is_linear):
        raise ValueError(
            f"the plan makes {name} ({type(module).__name__}) a {role}; allowed: embeddings as embedding, linear layers of "
            "Octet, torch and transformers otherwise. Change the plan, or the level: torchao's layers cannot be cut."
        )
    layout = layout_of(module)
    is_transposed = getattr(module, "is_transposed", layout is not None and layout.is_transposed)
    dim = int((role == "row") != is_transposed)
    groups = 3 if role == "column of 3" else 1
    try:
        cuts = {"weight": Cut.of(module.get_parameter("weight"), dim, groups, num_shards)}
        if module._parameters.get("bias") is not None and role != "row":
            cuts["bias"] = Cut.of(module.get_parameter("bias"), 0, groups, num_shards)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return cuts


def check_heads(model: nn.Module, degree: int) -> None:
    """Raise ValueError for a network of transformers whose heads the degree does not divide: a rank holds whole heads."""
    config: Any = getattr(getattr(model, "network", model), "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        num_heads = getattr(config, name, None)
        if isinstance(num_heads, int) and num_heads % degree:
            raise ValueError(
                f"config.{name} is {num_heads} and the tensor degree {degree}; allowed: a multiple of the degree, since each "
                "rank has whole heads. Change the degree, or the number of heads."
            )
