"""Read Accelerate's recipes: TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs, and dicts of their fields.

Objects are known by the names of their classes and read by their fields, so accelerate need not be installed, and those of
octet.compat.accelerate are read alike. A dict is an `fp8_config` if it has a key that no recipe of ours has.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from glob import escape
from typing import Any

from torch import nn

from octet.api_schemas.accelerate import is_accelerate, precision_from_accelerate
from octet.api_schemas.precision import TORCHAO_RECIPES, PrecisionSpec, TorchaoSpec
from octet.api_schemas.recipe import RecipeSpec
from octet.worker.fp8.layout import layout_of

_BACKENDS = {"FP8RecipeKwargs": None, "TERecipeKwargs": "te", "MSAMPRecipeKwargs": "msamp", "AORecipeKwargs": "ao"}
"""The backend of each class; FP8RecipeKwargs, which inherits from two others, has it in a field."""


def is_recipe_kwargs(recipe: object) -> bool:
    """Return whether an object is one of Accelerate's recipes, of a class derived from one, or a dict of their fields."""
    return _class_name(recipe) is not None or _is_fp8_config(recipe)


def precision_of(recipe: Any, level: str | None, model: nn.Module, is_sharded: bool = False) -> PrecisionSpec:
    """Return the precision that a recipe of Accelerate means for a model.

    level: takes the place of the recipe's own for Transformer Engine's recipe, which any level of FP8 can follow.
    is_sharded: FSDP2 will shard the weights, so torchao's gather in FP8 applies.
    Raises ValueError, with the name of the field, for what is not built, and for a level that contradicts the recipe.
    """
    name = _class_name(recipe) or "fp8_config"
    if isinstance(recipe, Mapping):
        backend, spec = "", precision_from_accelerate(recipe)
    elif (backend := str(_BACKENDS[name] or recipe.backend).lower()) == "ao":
        spec = _of_torchao(recipe, model, is_sharded)
    else:
        given = {field.name: getattr(recipe, field.name) for field in fields(recipe) if field.name != "backend"}
        spec = precision_from_accelerate(
            {"backend": backend} | {key: value for key, value in given.items() if value is not None}
        )
    if level in (None, spec.level):
        return spec
    if backend != "te" and spec.level != "te":
        raise ValueError(
            f"opt_level is {level!r} and the {name} means level {spec.level}; allowed: one of them. Leave out opt_level."
        )
    return PrecisionSpec.model_validate(spec.model_dump(exclude_defaults=True) | {"level": level})


def _is_fp8_config(recipe: object) -> bool:
    return isinstance(recipe, Mapping) and is_accelerate(recipe) and not recipe.keys() <= RecipeSpec.model_fields.keys()


def _class_name(recipe: object) -> str | None:
    return next((base.__name__ for base in type(recipe).__mro__ if base.__name__ in _BACKENDS), None)


def _of_torchao(recipe: Any, model: nn.Module, is_sharded: bool) -> PrecisionSpec:
    """Return an AORecipeKwargs' precision. Without a filter the first and the last linear layer stay, as in Accelerate."""
    torchao, scaling = _options_of(recipe)
    options: dict[str, Any] = {"level": "ao", "torchao": torchao, "recipe": scaling}
    if recipe.module_filter_func is None:
        options |= {"skip_first_layers": 1, "skip_last_layers": 1}
    else:
        linears = [(name, module) for name, module in model.named_modules() if layout_of(module) is not None]
        excluded = [escape(name) for name, module in linears if not recipe.module_filter_func(module, name)]
        options |= {"exclude": excluded, "convert_heads": True}
    if torchao.fsdp_float8_all_gather and not is_sharded:
        options["not_applied"] = (
            "enable_fsdp_float8_all_gather: FSDP2 shards no weights here: on one rank, or where the optimizer exists already",
        )
        options["torchao"] = torchao.model_copy(update={"fsdp_float8_all_gather": False})
    return PrecisionSpec.model_validate(options)


def _options_of(recipe: Any) -> tuple[TorchaoSpec, Any]:
    """Translate a `Float8LinearConfig` into our options and the scaling of its products."""
    config = recipe.config
    if config is None:
        gathers = bool(recipe.enable_fsdp_float8_all_gather)
        torchao = TorchaoSpec(pad_inner_dim=bool(recipe.pad_inner_dim), fsdp_float8_all_gather=gathers)
        return torchao, TORCHAO_RECIPES["tensorwise"]
    flags = {"pad_inner_dim": False, "enable_fsdp_float8_all_gather": False, "emulate": False}
    plain = replace(config, **flags)
    scaling = next((ours for name, ours in TORCHAO_RECIPES.items() if plain == type(config).from_recipe_name(name)), None)
    if scaling is None:
        tensorwise = type(config).from_recipe_name("tensorwise")
        changed = [field.name for field in fields(config) if getattr(plain, field.name) != getattr(tensorwise, field.name)]
        raise ValueError(
            f"the AORecipeKwargs' config changes {', '.join(changed)}; allowed: Float8LinearConfig.from_recipe_name of "
            f"{', '.join(TORCHAO_RECIPES)}, with pad_inner_dim. Change the config."
        )
    return TorchaoSpec(pad_inner_dim=config.pad_inner_dim, fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather), scaling
