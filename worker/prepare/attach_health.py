"""Let a converted model follow its optimizer, whose steps close windows of scaling and samples, and fit the loss scale."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from octet.api_schemas import PrecisionSpec
from octet.api_schemas.levels import LEVELS
from octet.worker.fp8.convert import ConversionReport
from octet.worker.fp8.fsdp import holds_codes, is_shard
from octet.worker.fp8.fsdp_gradients import send_gradients_in_fp8
from octet.worker.fp8.health import HealthEvent, StepKeeper
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.loss_scaling import LossScaling, scale_losses
from octet.worker.metrics.table import OperandSample
from octet.worker.optim import REPRESENTABLE, LowBitOptimizer, adopt, take_over


def follow_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int = 0, gradients: Literal["fp32", "fp8"] = "fp32"
) -> None:
    """Let the FP8 layers of a model follow an optimizer that was made after `initialize`, as FSDP2 needs it to be.

    Each of its steps then closes the windows of delayed scaling and the samples of `statistics_every`, as the steps of an
    optimizer do that `initialize` was given. Where FSDP2's shards hold codes, Adam and AdamW become `LowBitAdamW` with
    states in the level's formats, as in `initialize`. Nothing else happens. seed: for stochastic rounding.
    gradients: "fp8" lets FSDP2 send the gradients of weights of codes in FP8, a byte an element; "fp32" leaves them to it.
    Raises ValueError for a model that is not initialized, follows an optimizer already, or is not what the optimizer trains,
    and for "fp8" where no shard holds codes.
    """
    report = getattr(model, "octet_report", None)
    if not isinstance(report, ConversionReport):
        raise ValueError("the model is not initialized; allowed: one that `initialize` returned. Call initialize first.")
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in trained for parameter in model.parameters()):
        raise ValueError(
            "the optimizer has none of the model's parameters; allowed: the one that trains it. Make it after fully_shard, "
            "which replaces parameters."
        )
    if gradients not in ("fp32", "fp8"):
        raise ValueError(f"gradients is {gradients!r}; allowed: fp32, fp8. Use one of these.")
    if gradients == "fp8":
        send_gradients_in_fp8(model)
    if type(optimizer) in REPRESENTABLE and any(is_shard(held) and holds_codes(held) for held in model.parameters()):
        take_over(optimizer, adopt(optimizer, LEVELS[report.level], seed=seed))
    if isinstance(report.health, StepKeeper):
        follow(report.health, optimizer)


def follow(keeper: StepKeeper, optimizer: torch.optim.Optimizer) -> None:
    """Let a keeper follow an optimizer. Raises ValueError if it follows one already."""
    if keeper.follows:
        raise ValueError(
            "the model follows an optimizer already: the one that initialize or an earlier call got; allowed: one, since each "
            "step closes the windows of delayed scaling. Leave out the second."
        )
    keeper.follows = True
    optimizer.register_step_post_hook(partial(_keep, keeper))


def attach_health(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    precision: PrecisionSpec,
    on_event: Callable[[HealthEvent], None] | None,
) -> StepKeeper | None:
    """Let the FP8 layers do after each step of the optimizer what their recipe needs done."""
    recipe = precision.resolved_recipe
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    if not layers or recipe is None or (recipe.scaling != "delayed" and not precision.resolved_statistics_every):
        return None
    keeper = StepKeeper(layers, precision.demotion, on_event)
    model.register_state_dict_pre_hook(partial(_read_samples, keeper))
    if optimizer is not None:
        follow(keeper, optimizer)
    return keeper


def attach_loss_scaling(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Scale what comes back from a model's outputs, and fit the scale after each step of the optimizer."""
    scaling = scale_losses(model)
    if optimizer is not None:
        optimizer.register_step_post_hook(partial(_rescale, scaling))


def fp8_statistics(model: nn.Module) -> list[OperandSample]:
    """The newest samples of a model that was initialized with `statistics_every`, one for each operand of each layer."""
    report = getattr(model, "octet_report", None)
    if not isinstance(report, ConversionReport) or not isinstance(report.health, StepKeeper):
        raise ValueError("the model samples no statistics. Initialize it at an FP8 level with statistics_every.")
    report.health.read_all()
    return report.health.samples


def _read_samples(keeper: StepKeeper, *_state_dict: Any) -> None:
    """Let a state dict hold the demotions that samples under way decide."""
    keeper.read_all()


def _rescale(scaling: LossScaling, optimizer: torch.optim.Optimizer, *_step: Any) -> None:
    assert isinstance(optimizer, LowBitOptimizer)
    scaling.update(optimizer.skipped_steps)


def _keep(keeper: StepKeeper, *_step: Any) -> None:
    keeper.after_step()
