"""How the layers of a model are divided over the tensor axis: a role for each, by globs of their names."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, get_args

from torch import nn

from worker.models.model import TensorRole, TrainedModel
from worker.models.tensor_plan import plan_of_transformers

Plan = Mapping[str, TensorRole]


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


def held_part(plan: Plan, model: nn.Module) -> Plan:
    """Return the part of a whole model's plan that is about modules which this rank's stages have."""
    names = [name for name, _ in model.named_modules()]
    return {glob: role for glob, role in plan.items() if any(fnmatchcase(name, glob) for name in names)}


def plan_of(model: nn.Module, given: Mapping[str, str] | None = None) -> Plan:
    """Return the plan that was given, or else that of a family or of transformers. Raises ValueError where there is none.

    Without our loss, which needs no whole logits, the embedding and the head stay whole.
    """
    if given is not None:
        roles = get_args(TensorRole)
        if wrong := [f"{glob}: {role!r}" for glob, role in given.items() if role not in roles]:
            raise ValueError(f"the plan has {wrong[0]}; allowed: {', '.join(roles)}. Change the plan.")
        return given  # type: ignore[return-value]
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
