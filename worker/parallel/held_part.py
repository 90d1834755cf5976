"""The part of a converted model that a rank keeps where ranks hold different modules, and its place in checkpoints.

Stages of a pipeline and experts are kept so. The whole model is converted first, so each parameter has the random streams, the
codecs and the name that it has without the division. Modules that a rank lacks are None in its model. A checkpoint has the
names, numbers and whole tensors of the undivided model: the ranks describe to each other what each holds, and any layout reads
it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.common.wrap import wrapper_of
from octet.worker.fp8.accelerator import AutocastForward
from octet.worker.fp8.convert import ConversionReport
from octet.worker.mesh import Axis, Cut, SavedStates, TensorInPieces
from octet.worker.models.model import TrainedModel
from octet.worker.optim import LowBitOptimizer


@dataclass(eq=False)
class HeldPart:
    """This rank's part of a model and of its optimizer.

    absent: prefixes of the names that this rank lacks. numbers: of its parameters, counted in the whole model. num_parameters:
    tensors of the whole model. places: for each group of the optimizer, the indices of this rank's parameters in the whole
    group. num_in_groups: parameters of each whole group.
    """

    absent: tuple[str, ...]
    numbers: dict[Tensor, int]
    num_parameters: int
    places: list[list[int]]
    num_in_groups: list[int]

    def follow(self, replaced: Mapping[Tensor, nn.Parameter]) -> None:
        """Take the parameters that this rank holds now in the place of its old ones."""
        self.numbers = {replaced[parameter]: number for parameter, number in self.numbers.items()}

    @property
    def whole_numbers(self) -> list[int]:
        """The numbers in the whole optimizer of this rank's parameters there, in their order."""
        return [first + place for first, places in zip(self._firsts, self.places, strict=True) for place in places]

    @property
    def _firsts(self) -> list[int]:
        return [sum(self.num_in_groups[:index]) for index in range(len(self.num_in_groups))]

    def numbered(self, optimizer_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's state dict of an optimizer with the numbers, and the groups, of the whole one."""
        numbers = self.whole_numbers
        groups = [
            group | {"params": list(range(first, first + size))}
            for group, first, size in zip(optimizer_state["param_groups"], self._firsts, self.num_in_groups, strict=True)
        ]
        states = {numbers[number]: state for number, state in optimizer_state["state"].items()}
        return {**optimizer_state, "state": states, "param_groups": groups}

    def own_state(self, model: dict[str, Any], optimizer_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the part of whole state dicts that this rank holds."""
        kept = {name: held for name, held in model.items() if not name.startswith(self.absent)}
        groups = [
            group | {"params": [group["params"][place] for place in places]}
            for group, places in zip(optimizer_state["param_groups"], self.places, strict=True)
        ]
        saved = optimizer_state["state"]
        keys = [key for group in groups for key in group["params"] if key in saved]
        states = saved.only(keys) if isinstance(saved, SavedStates) else {key: saved[key] for key in keys}
        return kept, optimizer_state | {"state": states, "param_groups": groups}


def keep_part(model: nn.Module, optimizer: torch.optim.Optimizer, absent: Sequence[str]) -> HeldPart:
    """Let this rank keep a whole converted model, and its optimizer, without some modules. absent: their names.

    All ranks hold the same whole before. The optimizer has taken no step.
    """
    whole = list(model.parameters())
    groups = [list(group["params"]) for group in optimizer.param_groups]
    num_elements = sum(map(Tensor.numel, whole))
    for name in absent:
        holder, _, attribute = name.rpartition(".")
        model.get_submodule(holder)._modules[attribute] = None
    kept = set(model.parameters())
    _remove(optimizer, [parameter for parameter in whole if parameter not in kept])
    _forget_layers(model)
    if isinstance(model, TrainedModel):
        model.num_parameters_elsewhere = num_elements - sum(map(Tensor.numel, kept))
    return HeldPart(
        tuple(f"{name}." for name in absent),
        {parameter: number for number, parameter in enumerate(whole) if parameter in kept},
        len(whole),
        [[index for index, parameter in enumerate(group) if parameter in kept] for group in groups],
        [len(group) for group in groups],
    )


def _remove(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Remove parameters that this rank lacks from an optimizer. The others keep their random streams."""
    dropped = set(parameters)
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter not in dropped]
    for parameter in dropped:
        if isinstance(optimizer, LowBitOptimizer):
            optimizer.forget(parameter)
        else:
            optimizer.state.pop(parameter, None)


def _forget_layers(model: nn.Module) -> None:
    """Keep in a model's report and in its casts only the layers that are left."""
    report = getattr(model, "octet_report", None)
    layers = dict(model.named_modules())
    if isinstance(report, ConversionReport):
        if report.health is not None:
            report.health.layers = {name: layer for name, layer in report.health.layers.items() if name in layers}
        model.octet_report = replace(report, converted=tuple(name for name in report.converted if name in layers))  # type: ignore[assignment]
    for module in layers.values():
        if (forward := wrapper_of(module, AutocastForward)) is not None:
            converted = (layer for layer in module.modules() if getattr(layer, "returns_16_bits", False))
            forward.layer = next(converted, forward.layer)


def in_pieces(value: Any, holders: Axis, first_rank: int, stride: int = 1) -> Any:
    """Return a part of a state dict with each tensor as a piece of the ranks that write it: the first, or all that divide it.

    holders: the ranks that hold the same. first_rank: the first of them in the world; stride: from one of them to the next.
    """
    if isinstance(value, TensorInPieces):
        return replace(value, first_rank=first_rank, stride=value.stride * stride)
    if isinstance(value, Tensor):
        own = value.detach().reshape(-1)
        places = ((0, own.numel()),)
        return TensorInPieces(own if holders.is_first else own[:0], tuple(value.shape), places, first_rank=first_rank)
    if isinstance(value, dict):
        return {key: in_pieces(item, holders, first_rank, stride) for key, item in value.items()}
    return value


def joined_over(axis: Axis, own: dict[str, dict[Any, Any]]) -> dict[str, dict[Any, Any]]:
    """Return dicts of state with the entries of all ranks of the axis; of others' tensors only the places are known."""
    whole: dict[str, dict[Any, Any]] = {kind: {} for kind in own}
    for described in axis.gather_texts(json.dumps(_described(own))):
        for kind, held in _read(json.loads(described)).items():
            whole[kind] |= held
    return {kind: held | own[kind] for kind, held in whole.items()}


def _described(value: Any) -> Any:
    """Return a tree of pieces as JSON, without their numbers."""
    if isinstance(value, TensorInPieces):
        cut = None if value.cut is None else asdict(value.cut)
        return {"piece": [value.shape, value.places, value.stride, cut, value.first_rank]}
    if isinstance(value, dict):
        return {"dict": [[key, _described(item)] for key, item in value.items()]}
    return {"value": value}


def _read(described: Any) -> Any:
    """Return the tree that `_described` has written; pieces hold no numbers."""
    ((kind, content),) = described.items()
    if kind == "piece":
        shape, places, stride, described_cut, first_rank = content
        cut = None if described_cut is None else Cut(**described_cut | {"shape": tuple(described_cut["shape"])})
        return TensorInPieces(
            torch.empty(0), tuple(shape), tuple((first, length) for first, length in places), stride, cut, first_rank
        )
    return {key: _read(item) for key, item in content} if kind == "dict" else content
