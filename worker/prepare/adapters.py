"""Adapters of a frozen model (LoRA, Hu et al. 2021, section 4.1): their layers, and what a checkpoint holds of such a job.

    output = frozen(input) + (alpha / rank) · input @ a.T @ b.T        a (rank, in), b (out, rank)

The adapters are one module of the model, `adapters`, and each adds to the output of its layer by a hook. So the frozen layers
keep their names and places, and a level converts them as if there were no adapters. A frozen weight of codes needs no master
weight. What no level converts of a frozen model, embeddings and heads, is held in bf16 where the level holds codes.
Shape suffixes: R rank, K in features, N out features.
"""

import math
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from octet.api_schemas.conversion import HEADS, matches
from octet.api_schemas.precision import PrecisionSpec
from octet.api_schemas.training import AdapterSpec
from octet.worker.common.errors import InvalidConfig
from octet.worker.fp8.accelerator import is_accelerator
from octet.worker.fp8.convert import replaceable_linears, select_layers
from octet.worker.fp8.layout import layout_of
from octet.worker.fp8.stacks import stacks_of
from octet.worker.fp8.stored import CODES, PARTS, exact_state_dict

NAME = "adapters"
"""The model's attribute that holds all adapters, by the names of their layers with SEPARATOR for each dot."""
SEPARATOR = "/"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Adapter(nn.Module):
    """The product of two narrow matrices. It begins as zero: b is 0, and a uniform as `nn.Linear` has it."""

    def __init__(self, a_RK: Tensor, b_NR: Tensor, factor: float) -> None:
        super().__init__()
        self.a, self.b, self.factor = nn.Parameter(a_RK), nn.Parameter(b_NR), factor

    def forward(self, input: Tensor) -> Tensor:
        """Return what is added to the layer's output (…, N). On CPU bf16 values are multiplied in fp32."""
        dtype = torch.bfloat16 if is_accelerator(input.device) else torch.float32
        with torch.autocast(input.device.type, enabled=False):
            narrow = functional.linear(input.to(dtype), self.a.to(dtype))
            return functional.linear(narrow, self.b.to(dtype)) * self.factor


class _Add:
    """Add an adapter's output to its layer's, as a hook of the layer."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def __call__(self, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + self.adapter(inputs[0]).to(output.dtype)


def add_adapters(model: nn.Module, spec: AdapterSpec | None, precision: PrecisionSpec, seed: int, device: torch.device) -> None:
    """Freeze a model before it is converted, and give it adapters on the device. Nothing happens without a spec.

    The model may be on `meta`. Values depend on the seed alone. Raises InvalidConfig if a target matches no layer.
    """
    if spec is None:
        return
    names = _targets(model, spec)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if precision.storage.weight != "fp32":
        _hold_rest_in_bf16(model, set(select_layers(model, precision)[0]))
    generator = torch.Generator().manual_seed(seed)
    adapters, dtype = nn.ModuleDict(), DTYPES[spec.dtype]
    for name in names:
        layout = layout_of(model.get_submodule(name))
        assert layout is not None
        bound = 1 / math.sqrt(layout.in_features)
        a_RK = torch.empty(spec.rank, layout.in_features).uniform_(-bound, bound, generator=generator)
        b_NR = torch.zeros(layout.out_features, spec.rank)
        adapters[name.replace(".", SEPARATOR)] = Adapter(a_RK.to(device, dtype), b_NR.to(device, dtype), spec.alpha / spec.rank)
    model.add_module(NAME, adapters)


def attach_adapters(model: nn.Module) -> None:
    """Let each converted layer add the output of its adapter, if the model has adapters."""
    for name, adapter in adapters_of(model).items():
        model.get_submodule(name).register_forward_hook(_Add(adapter))


def adapters_of(model: nn.Module) -> Mapping[str, Adapter]:
    """Return a model's adapters by the names of their layers."""
    held = getattr(model, NAME, None)
    return {} if held is None else {name.replace(SEPARATOR, "."): cast(Adapter, adapter) for name, adapter in held.items()}


def trained_state(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds of a model's state dict: all of it, or, with adapters, all but the frozen values.

    The adapters stay, and what the frozen layers remember of their operands' scales.
    """
    if not adapters_of(model):
        return state
    frozen = _frozen_names(model)
    return {name: value for name, value in state.items() if name not in frozen}


def with_frozen(model: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with the frozen values that the model holds: those of its folder."""
    if not adapters_of(model):
        return saved
    frozen = _frozen_names(model)
    return saved | {name: value for name, value in exact_state_dict(model).items() if name in frozen}


def _frozen_names(model: nn.Module) -> set[str]:
    """The names in a state dict of frozen parameters, and of the codes and scales that hold one."""
    names: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            prefix = name.removesuffix("weight")
            names |= {name, *(prefix + part for part in (CODES, *PARTS) if name.endswith("weight"))}
    return names


def _targets(model: nn.Module, spec: AdapterSpec) -> list[str]:
    """The names of the layers to adapt, in the model's order. Experts of a mixture have none: peft has no form for them."""
    experts = {part.removesuffix(".weight") for stack in stacks_of(model) for part in stack.parts}
    linears = [name for name in replaceable_linears(model) if not matches(name, HEADS) and name not in experts]
    matched: dict[str, None] = {}
    for target in spec.targets:
        found = [name for name in linears if fnmatchcase(name, target) or name.endswith(f".{target}")]
        if not found:
            last_parts = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            raise InvalidConfig(
                f"adapter.targets: {target!r} matches no linear layer of the model; allowed: globs over their names, or last "
                f"parts of them: {last_parts}. Change adapter.targets."
            )
        matched |= dict.fromkeys(found)
    return [name for name in linears if name in matched]


def _hold_rest_in_bf16(model: nn.Module, converted: set[str]) -> None:
    """Hold embeddings and linear layers that stay in 16 bits as bf16. An embedding still returns fp32."""
    users: Counter[nn.Parameter] = Counter()
    plain_users: Counter[nn.Parameter] = Counter()
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users[parameter] += 1
            plain_users[parameter] += type(module) is nn.Embedding or (type(module) is nn.Linear and name not in converted)
    for parameter in users:
        if parameter.dim() == 2 and users[parameter] == plain_users[parameter]:
            parameter.data = parameter.data.to(torch.bfloat16)
    for module in model.modules():
        if type(module) is nn.Embedding and module.weight.dtype == torch.bfloat16:
            module.register_forward_hook(_widen)


def _widen(_embedding: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.float()
