"""`initialize`: make a model and its optimizer train at a precision level, in any loop.

    model, optimizer = initialize(model, optimizer, opt_level="O2")
    loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()

Linear layers are replaced in place; parameter objects stay, and the optimizer object stays and
changes its class, so that groups, learning rates, hooks and schedulers stay. Call it when the model
is on its device; load checkpoints afterwards. `prepare` lists what is done, in its order.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from octet.api_schemas.precision import PrecisionSpec
from octet.worker.fp8.accelerator import run_under_autocast
from octet.worker.fp8.attention import unstack_attention
from octet.worker.fp8.casts import guard_casts
from octet.worker.fp8.convert import ConversionReport
from octet.worker.fp8.experts import unstack_experts
from octet.worker.fp8.gate_forward import carry_activations
from octet.worker.fp8.gathered import gather_in_fp8
from octet.worker.fp8.health import HealthEvent, StepKeeper
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from octet.worker.fp8.norm_forward import carry_norms
from octet.worker.fp8.norms import replace_norms
from octet.worker.fp8.recipe_kwargs import is_recipe_kwargs, precision_of
from octet.worker.fp8.speedups import DEFAULT_TOKENS
from octet.worker.fp8.weight import is_float8_weight
from octet.worker.metrics.memory import memory_report
from octet.worker.optim import REPRESENTABLE, LowBitOptimizer, adopt, make_by_name, take_over
from octet.worker.prepare.attach_health import attach_health, attach_loss_scaling
from octet.worker.prepare.convert import Conversion, WeightSource, convert, half_dtype, share_rounding
from octet.worker.prepare.export_state_dict import save_plainly
from octet.worker.prepare.options import check_optimizer, check_tokens, gathers_weights, read_options, select_half_norms


@dataclass(frozen=True)
class Prepared:
    """A converted model with its optimizer.

    health: follows FP8 from step to step; None at levels that have nothing to follow.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    report: ConversionReport
    health: StepKeeper | None


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str | PrecisionSpec | None = None,
    *,
    optimizer_name: str | None = None,
    seed: int = 0,
    tokens: int | None = None,
    on_event: Callable[[HealthEvent], None] | None = None,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Convert `model` to a level; return it with an optimizer that holds states in its formats.

    opt_level: a level's name, with the other fields of `PrecisionSpec` as options; or a whole spec;
    default "O2". The option `recipe` may be one of Accelerate's (TERecipeKwargs, AORecipeKwargs,
    MSAMPRecipeKwargs, FP8RecipeKwargs, or a dict of their fields), which chooses the level unless opt_level does. The option
    `norms="bf16"` gives LayerNorm and RMSNorm weights and outputs in bf16, with fp32 statistics.
    optimizer_name: adamw, adam, lion, muon or sgd, with default hyperparameters, for all parameters;
    without it and an optimizer there is none. seed: for stochastic rounding. tokens: how many a
    linear layer sees in one forward pass on one device, by which `auto_filter` finds what gains
    nothing in FP8; default 8192. on_event: called when a layer is demoted. `model.octet_report`
    lists what was done.

    On an accelerator the converted model, and each part of it, enters `torch.autocast` by itself
    when it is called: in fp16 where the level's products are fp16, else in bf16. An autocast that
    is on already stays as it is.

    Experts of transformers that lie in one parameter become a parameter each, at levels that multiply
    in FP8: give the optimizer, which follows, or make it afterwards.

    The given optimizer itself becomes what is returned: schedulers, hooks and groups that refer to
    it stay valid. Adam and AdamW become `LowBitAdamW`, which also skips steps with non-finite
    gradients; `LowBitAdamW`, `LowBitLion` and `LowBitSGD` keep their class. Another optimizer stays
    as it is where the level stores everything in fp32.

    Raises ValueError for options that do not exist or do not fit the level, for an optimizer that
    the level cannot represent, and for surprises under `strict`. Warns where nothing was converted.
    """
    _check_kinds(model, optimizer)
    if any(hasattr(module, "octet_report") for module in model.modules()):
        raise ValueError("the model, or a part of it, is initialized already. Build a new one to train it at another level.")
    if is_recipe_kwargs(options.get("recipe")) and not isinstance(opt_level, PrecisionSpec):
        meant = precision_of(options.pop("recipe"), opt_level, model, is_sharded=_is_sharded(optimizer, optimizer_name))
        opt_level, options = meant.level, meant.model_dump(exclude={"level"}, exclude_defaults=True) | options
    precision = read_options("O2" if opt_level is None else opt_level, options)
    if optimizer_name is not None:
        if optimizer is not None:
            raise ValueError("got both an optimizer and optimizer_name; allowed: one of them. Leave one out.")
        optimizer = make_by_name(optimizer_name, model)
    prepared = prepare(model, optimizer, precision, seed=seed, tokens=tokens, on_event=on_event)
    if dist.is_available() and dist.is_initialized():
        share_rounding(prepared.model, dist.get_rank(), dist.get_world_size())
    if prepared.report.nothing_converted:
        warnings.warn(prepared.report.nothing_converted, stacklevel=2)
    return prepared.model, prepared.optimizer


def _check_kinds(model: object, optimizer: object) -> None:
    """Raise TypeError for arguments in another order."""
    order = 'Call initialize(model, optimizer, opt_level="O2").'
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; allowed: a torch.nn.Module. {order}")
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise TypeError(f"optimizer: got {type(optimizer).__name__}; allowed: a torch.optim.Optimizer, or None. {order}")


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    precision: PrecisionSpec,
    *,
    seed: int = 0,
    tokens: int | None = None,
    on_event: Callable[[HealthEvent], None] | None = None,
    source: WeightSource | None = None,
) -> Prepared:
    """Check everything, convert the model, then make its optimizer.

    Arguments and errors as for `initialize`.

    source: gives a model on `meta` its values. `model.octet_report` is the report. A job's options
    that save memory come later: `memory_options.prepare_steps`.
    """
    storage = precision.storage
    # Nothing is changed before all checks have passed; `convert` has the last of them.
    check_tokens(tokens)
    if optimizer is not None:
        check_optimizer(optimizer, model, precision)
    norms, skipped_norms = select_half_norms(model, optimizer, precision)
    unstack_experts(model, precision, optimizer)
    unstack_attention(model, precision, optimizer)
    conversion = convert(model, precision, seed=seed, tokens=DEFAULT_TOKENS if tokens is None else tokens, source=source)
    model = conversion.model

    # Layers
    if gathers_weights(precision):
        gather_in_fp8(model)
    replace_norms(model, norms)
    carry_norms(model)
    carry_activations(model)
    if source is not None:
        source.finish(model, optimizer)

    # The optimizer, and what follows its steps
    optimizer = _adopt(optimizer, conversion, precision, seed)
    health = attach_health(model, optimizer, precision, on_event)

    # The model as a whole
    scales_losses = storage.loss_scaling and any(parameter.requires_grad for parameter in model.parameters())
    if storage.gemm == "fp8" or isinstance(optimizer, LowBitOptimizer) or scales_losses:
        guard_casts(model, keep=(STATE_BUFFER,) if scales_losses else ())
    save_plainly(model)
    run_under_autocast(model, half_dtype(storage), is_on_cpu_too=bool(norms))
    if scales_losses:
        attach_loss_scaling(model, optimizer)

    report = replace(
        conversion.report,
        norms=tuple(norms),
        skipped_norms=tuple(skipped_norms),
        bytes_by_class=memory_report(model, optimizer),
        health=health,
        model=model,
    )
    model.octet_report = report  # type: ignore[assignment]
    return Prepared(model, optimizer, report, health)


def _adopt(
    optimizer: torch.optim.Optimizer | None, conversion: Conversion, precision: PrecisionSpec, seed: int
) -> torch.optim.Optimizer | None:
    """Let an optimizer hold its states in the level's formats, with master weights of old values."""
    if optimizer is not None and type(optimizer) in REPRESENTABLE:
        adopted = adopt(optimizer, precision.storage, seed=seed)
        optimizer = take_over(optimizer, adopted)
    for parameter in conversion.model.parameters():  # masters exist now; a layer that is not trained, or not yet, has none
        if is_float8_weight(parameter) and not (_is_sharded(optimizer, None) and parameter.requires_grad):
            parameter.state.wide = None
    return optimizer


def _is_sharded(optimizer: torch.optim.Optimizer | None, optimizer_name: str | None) -> bool:
    """Return whether FSDP2 may shard the model later: several ranks, and no optimizer yet."""
    in_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return in_ranks and optimizer is None and optimizer_name is None
