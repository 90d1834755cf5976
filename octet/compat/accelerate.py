"""Accelerate's recipe classes with their fields and defaults, for machines without Transformer Engine and torchao.

    from octet.compat.accelerate import TERecipeKwargs
    model, optimizer = octet.initialize(model, optimizer, recipe=TERecipeKwargs(margin=1))

Accelerate's own TERecipeKwargs raises an ImportError where Transformer Engine is not installed, and AORecipeKwargs without
torchao, though a recipe holds numbers alone. `octet.initialize` takes both kinds, and `fp8_config` as a dict. These read no
environment variables (ACCELERATE_FP8_…), and an `Accelerator` does not take them. Fields are those of Accelerate 1.15.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

__all__ = ["AORecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"]


@dataclass
class TERecipeKwargs:
    """Transformer Engine's delayed scaling, or MXFP8; level te, or the level in `opt_level` of `octet.initialize`.

    override_linear_precision: for fprop, dgrad and wgrad, true for a product in bf16.
    """

    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = 1
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "most_recent"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_mxfp8_block_scaling: bool = False


@dataclass
class MSAMPRecipeKwargs:
    """MS-AMP's level. Accelerate itself takes O1 and O2."""

    opt_level: Literal["O1", "O2", "O3"] = "O2"


@dataclass
class AORecipeKwargs:
    """torchao's products, at level ao, which needs torchao when the model is converted.

    config: a `Float8LinearConfig`, in the place of the two switches below it. module_filter_func: of a module and its name,
    true for a layer to convert; without it all but the first and the last linear layer are.
    """

    config: Any = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    pad_inner_dim: bool = True
    enable_fsdp_float8_all_gather: bool = True
