"""MS-AMP's names: `initialize`, `clip_grad_norm_` and `deepspeed`, with its arguments, defaults and order.

    import octet.compat.msamp as msamp
    model, optimizer = msamp.initialize(model, optimizer, opt_level="O2")

A file that says `import msamp` runs as it stands by `python -m octet.compat.msamp FILE …`, or under torchrun by
`torchrun … -m octet.compat.msamp FILE …`. docs/coming-from.md lists what differs from MS-AMP 0.4.
"""

from collections.abc import Iterable
from glob import escape
from typing import Any

import torch
from torch import Tensor

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize as convert

__all__ = ["clip_grad_norm_", "initialize", "opt_levels"]

opt_levels = ["O1", "O2", "O3"]
"""MS-AMP's list with O3, which it has in DeepSpeed's configuration alone."""

NOT_BUILT = {
    "LinearReplacer": "call msamp.initialize, which replaces linear layers",
    "TeReplacer": "call msamp.initialize(…, use_te=True) on torch's own layers",
    "LBAdam": "give torch.optim.Adam to msamp.initialize, which keeps its states in the level's formats",
    "LBAdamW": "give torch.optim.AdamW to msamp.initialize, which keeps its states in the level's formats",
    "DSAdam": "give torch.optim.AdamW to msamp.initialize, which keeps its states in the level's formats",
    "fsdp": "call msamp.initialize, then octet.parallelize(model, optimizer, zero_stage=3)",
    "megatron": "use octet.parallelize(model, optimizer, tensor=…, pipeline=…)",
    "nn": "call msamp.initialize",
    "optim": "give torch's optimizer to msamp.initialize",
    "te": "call msamp.initialize(…, use_te=True) on torch's own layers",
    "common": "a converted weight is a tensor: weight.codes, weight.dequant_scale",
}
"""MS-AMP's other public names, each with what takes its place."""


def initialize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O1",
    use_te: bool = False,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Convert a model and its optimizer as `msamp.initialize` does; return both.

    opt_level: O1, O2 or O3 of `octet.initialize`. optimizer: without one, torch's AdamW with its defaults.
    use_te: scale products as Transformer Engine does, with a history of amaxes. As in MS-AMP every `nn.Linear` is converted,
    heads too, unless it has the attribute `use_fp32_linear = True`; that one multiplies in 16 bits.
    Raises ValueError for another level, for a model of Transformer Engine's modules with use_te, and as `octet.initialize`.
    """
    if opt_level not in opt_levels:
        hint = f" Did you mean 'O{opt_level[1:]}', with the letter O?" if str(opt_level) in ("01", "02", "03") else ""
        raise ValueError(f"opt_level is {opt_level!r}; allowed: {', '.join(opt_levels)}. Change it.{hint}")
    if use_te:
        _refuse_te_modules(model)
    if optimizer is None and isinstance(model, torch.nn.Module):
        optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"convert_heads": True, "exclude": kept_layers(model)}
    if use_te:
        options["recipe"] = LEVELS["te"].recipe
    converted, adopted = convert(model, optimizer, opt_level, **options)
    assert adopted is not None
    return converted, adopted


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients so that their norm as one vector is at most max_norm; return the norm before, fp32 ().

    max_norm: 0 or less clips nothing, as in MS-AMP; torch's function would set every gradient to 0.
    Raises RuntimeError under error_if_nonfinite for a norm that is not finite.
    """
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if max_norm > 0:
        return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type, error_if_nonfinite)
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    return torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)


def kept_layers(model: torch.nn.Module) -> tuple[str, ...]:
    """Return globs of the linear layers that are marked by `use_fp32_linear`."""
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    return tuple(
        escape(name)
        for name, module in modules
        if isinstance(module, torch.nn.Linear) and getattr(module, "use_fp32_linear", False)
    )


def _refuse_te_modules(model: torch.nn.Module) -> None:
    """Raise ValueError for a module of Transformer Engine, which computes with kernels of its own."""
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    for name, module in modules:
        if type(module).__module__.partition(".")[0] == "transformer_engine":
            raise ValueError(
                f"use_te is True and {name or 'the model'} is a {type(module).__name__} of transformer_engine; allowed: "
                "torch's own layers, which use_te scales as Transformer Engine does. Use nn.Linear and torch's norms."
            )


def __getattr__(name: str) -> Any:
    """Raise for another name of MS-AMP, with what takes its place: ImportError, so that `from msamp import` shows it."""
    if name in NOT_BUILT:
        raise ImportError(f"msamp.{name} is not built in octet.compat.msamp: {NOT_BUILT[name]}.", name=f"msamp.{name}")
    raise AttributeError(f"module 'octet.compat.msamp' has no attribute {name!r}; public: {', '.join(__all__)}")
