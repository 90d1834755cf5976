"""Start a converted model from a Hugging Face checkpoint without holding it in fp32.

The model is built on the device `meta`. Each linear layer is read from the files when it is converted, and is codes before the
next one is read; what no level converts is read afterwards. An optimizer is made for the parameters on `meta` and follows them.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octet.api_schemas import SpecConflict
from octet.api_schemas.precision import PrecisionSpec
from octet.worker.common.deferred import defer_parameters, move_buffers
from octet.worker.fp8.experts import unstack_experts
from octet.worker.fp8.linear import Float8Linear
from octet.worker.models.initial import parameters_on_meta
from octet.worker.optim import LowBitOptimizer
from octet.worker.parallel.materialize import Unfilled, Values, fill_later, unfilled_parameters
from octet.worker.prepare.convert import share_rounding
from octet.worker.prepare.initialize import Prepared, prepare
from octet.worker.prepare.options import read_options
from octet.worker.pretrained.files import PretrainedFiles
from octet.worker.pretrained.layouts import Layout, Place, layout_in_file, places_in_file

ROWS = 1024
"""Rows that are compared at a time."""
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def load_pretrained(
    folder: str | Path,
    opt_level: str = "O2",
    *,
    build: Callable[[], nn.Module] | None = None,
    make_optimizer: MakeOptimizer | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    by_shard: bool = False,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Return a model at a level with the values of a checkpoint folder, and its optimizer, as `initialize` does.

    folder: `config.json` and safetensors, plain or FP8 in the forms of `api_schemas/models/weight_files.py`. build: makes the
    model; by default transformers makes it in fp32 from `config.json`. make_optimizer: given the model, whose parameters are
    still without values, makes an optimizer that has not stepped. The rest: as for `initialize`.
    At its peak this holds what the level holds and the layer that is being read; files are mapped into memory, not read as a
    whole.
    by_shard: read nothing yet. `octet.parallelize`, which has to follow, divides the model, and then each rank reads its share,
    one parameter at a time. The bits are those of a model that was read whole.

    Raises ValueError for what `initialize` refuses, and, before anything is read, for tensors that are missing or have another
    shape; with by_shard also without an optimizer of ours, and at level ao, which converts layers that have their values.
    """
    try:
        files = PretrainedFiles(Path(folder))
    except SpecConflict as conflict:
        raise conflict.moved_to("folder") from None
    with parameters_on_meta():
        model = _from_transformers(files) if build is None else build()
    tokens = options.pop("tokens", None)
    precision = read_options(opt_level, options)
    unstack_experts(model, precision)
    try:
        source = FileSource(files, model, torch.device(device))
    except SpecConflict as conflict:
        raise conflict.moved_to("folder") from None
    values = ReadValues(source, model) if by_shard else None
    if values is not None:
        check_engine("by_shard is True", precision)
    optimizer = None if make_optimizer is None else make_optimizer(model)
    prepared = prepare(model, optimizer, precision, seed=seed, tokens=tokens, source=source)
    if values is None:
        source.make_masters(prepared.model, prepared.optimizer)
        if dist.is_available() and dist.is_initialized():
            share_rounding(prepared.model, dist.get_rank(), dist.get_world_size())
    else:
        leave_to_parallelize("by_shard is True", prepared, values)
    return prepared.model, prepared.optimizer


def check_engine(what: str, precision: PrecisionSpec) -> None:
    """Raise ValueError for a level that converts no layer without values. what: was asked for."""
    if precision.storage.engine == "torchao":
        raise ValueError(f"{what} at level ao; allowed: other levels. Each rank makes the whole model at this one.")


def leave_to_parallelize(what: str, prepared: Prepared, values: Values) -> None:
    """Let `parallelize` give a model its values, after it has divided it. Raises ValueError for an optimizer of others."""
    if not isinstance(prepared.optimizer, LowBitOptimizer):
        raise ValueError(
            f"{what} and the optimizer is {type(prepared.optimizer).__name__}; allowed: one that initialize takes over, as "
            "AdamW. Let make_optimizer make one."
        )
    fill_later(prepared.model, values)
    if dist.is_available() and dist.is_initialized():
        share_rounding(prepared.model, dist.get_rank(), dist.get_world_size())


class FileSource:
    """Gives the parameters of a model on `meta` their values, one layer at a time."""

    def __init__(self, files: PretrainedFiles, model: nn.Module, device: torch.device) -> None:
        """Find every parameter's tensor. Raises ValueError that names those that are missing or have another shape.

        SpecConflict, a ValueError, for a parameter that has two names and other values under each.
        """
        self.files, self.device = files, device
        self.layout: Layout = layout_in_file(model, files.config)
        self._names: dict[int, str] = {}
        self._given: dict[int, nn.Parameter] = {}
        self._dequant_scales: dict[Tensor, Tensor] = {}
        self._meta: list[nn.Parameter] = []  # kept alive, so that ids stay unique
        self._places = self._find(model)
        names_of: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(parameter), []).append(name)
            self._meta.append(parameter)
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in self._places}
        missing = []
        for key, names in names_of.items():
            found = next((name for name in names if name in self._places), None)
            missing += [] if found else [self.layout.rename(names[0])]
            self._names[key] = found or names[0]
        if missing:
            raise ValueError(
                f"{files.folder} has no {missing[0]}, nor {len(missing) - 1} more of the model's parameters; allowed: a "
                "checkpoint of this model. Build the model that the checkpoint is of."
            )
        for parameter in model.parameters():
            self._check_shape(parameter)
        for names in names_of.values():
            self._check_tie([self._places[name].parts[0].name for name in names if name in self._places])

    def values(self, names: Sequence[str]) -> Tensor:
        """Return the values of a parameter, on the device, by its names in the model."""
        return self._values(next(name for name in names if name in self._places))

    def scale_of(self, names: Sequence[str]) -> Tensor | None:
        """Return the scale of a parameter whose codes in the file a level takes as they are, by its names in the model."""
        place = self._places[next(name for name in names if name in self._places)]
        scales = [self.files.dequant_scale(part.name, part.matrix) for part in place.parts[: 1 if place.is_stack else None]]
        if place.is_stack or any(scale is None or not torch.equal(scale, scales[0]) for scale in scales):  # type: ignore[arg-type]
            return None
        assert scales[0] is not None
        return scales[0].to(self.device)

    def dequant_scale(self, weight: Tensor) -> Tensor | None:
        """Return the scale of a filled weight whose codes in the file a level takes as they are; None for others."""
        return self._dequant_scales.get(weight)

    def unknown_names(self) -> list[str]:
        """Return the file's names of tensors that the model does not have."""
        known = {part.name for place in self._places.values() for part in place.parts}
        return [name for name in self.files.names if name not in known]

    def _find(self, model: nn.Module) -> dict[str, Place]:
        """Find each tensor of the model in the files, by the model's names; a name that they lack is left out."""
        found, places_of = dict[str, Place](), places_in_file(model, self.layout)
        named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, tensor in chain(*named):
            for place in places_of(name, tensor.shape):
                if place.parts and all(part.name in self.files for part in place.parts):
                    found[name] = place
                    break
        return found

    def fill(self, layer: nn.Module) -> None:
        """Put the values of a layer's own parameters in the place of those on `meta`."""
        for attribute, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                setattr(layer, attribute, self._parameter(parameter))

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Fill what is still on `meta`, read the buffers and move them, and give the optimizer the new parameters."""
        for name, buffer in self._buffers.items():
            buffer.copy_(self._values(name))
        for module in model.modules():
            self.fill(module)
        move_buffers(model, self.device)
        for group in optimizer.param_groups if optimizer is not None else ():
            group["params"] = [self._given.get(id(parameter), parameter) for parameter in group["params"]]

    def make_masters(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Make each master weight of the file's values; so far they were made of codes.

        Where the codes are the file's own, so are the values of the masters already.
        """
        for name, layer in model.named_modules():
            if not isinstance(layer, Float8Linear) or layer.weight in self._dequant_scales:
                continue
            if layer.encoded is not None and layer.encoded.state.has_master:
                assert isinstance(optimizer, LowBitOptimizer)
                layer.encoded.assign(self._values(f"{name}.weight".lstrip(".")))
                optimizer.follow_weight(layer.weight)

    def _parameter(self, on_meta: nn.Parameter) -> nn.Parameter:
        if id(on_meta) not in self._given:
            values = self._values(self._names[id(on_meta)]).to(on_meta.dtype)
            parameter = nn.Parameter(values, requires_grad=on_meta.requires_grad)
            self._given[id(on_meta)] = parameter
            if (scale := self.scale_of([self._names[id(on_meta)]])) is not None:
                self._dequant_scales[parameter] = scale
        return self._given[id(on_meta)]

    def _values(self, name: str) -> Tensor:
        """The tensor that the model calls `name`, on the device."""
        place, matrices = self._places[name], []
        for parts in place.matrices:
            rows = [self.files.read(part.name, part.matrix).to(self.device) for part in parts]
            matrices.append(rows[0] if len(rows) == 1 else torch.cat(rows))
        return self.layout.from_file(name, torch.stack(matrices) if place.is_stack else matrices[0]).contiguous()

    def _check_shape(self, parameter: nn.Parameter) -> None:
        name = self._names[id(parameter)]
        place, expected = self._places[name], tuple(self.layout.to_file(name, parameter).shape)
        of_matrix = expected[1:] if place.is_stack else expected
        for parts in place.matrices:
            shapes = [self.files.shape(part.name)[0 if part.matrix is None else 1 :] for part in parts]
            found = shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])
            if found != of_matrix or any(shape[1:] != found[1:] for shape in shapes):
                raise ValueError(
                    f"{parts[0].name} in {self.files.folder} has shape {found}; the model's is {of_matrix}. Build the model "
                    "that the checkpoint is of."
                )

    def _check_tie(self, names: Sequence[str]) -> None:
        """Refuse a folder whose tensors of one parameter differ: all but one would be lost, such as a trained head."""
        for other in names[1:]:
            if not _are_equal(self.files.read(names[0]), self.files.read(other)):
                got = f"{self.files.folder}, where {names[0]} and {other} have different values"
                allowed = "the same values, because config.json ties them to one parameter"
                raise SpecConflict("model.path", got, allowed, "Set tie_word_embeddings to false in config.json.")


class ReadValues:
    """Reads the values of a model from a folder, one tensor at a time. Nothing is read of what a rank does not hold."""

    def __init__(self, source: FileSource, model: nn.Module) -> None:
        """model: that of the source, on `meta`; its parameters are on the device afterwards, without memory."""
        self.source, self.unfilled = source, unfilled_parameters(model)
        defer_parameters(model, source.device)

    def read(self, parameter: Unfilled) -> Tensor:
        """Return a parameter's whole values, in the dtype of the file or decoded from FP8."""
        return self.source.values(parameter.names)

    def scale_of(self, parameter: Unfilled) -> Tensor | None:
        """Return the scale of a parameter that is E4M3 codes of the kind that levels hold; None for others."""
        return self.source.scale_of(parameter.names)

    def skip(self, parameter: Unfilled) -> None:
        """Read nothing."""


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Compare values, of any dtypes, without a copy of the whole."""
    if one.shape != other.shape:
        return False
    return all(torch.equal(a.float(), b.float()) for a, b in zip(one.split(ROWS), other.split(ROWS), strict=True))


def _from_transformers(files: PretrainedFiles) -> nn.Module:
    """Build the model of `config.json` in fp32, without the quantization that the folder has."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError("transformers is not installed; install it, or give `build`, which makes the model.") from error

    config = transformers.AutoConfig.from_pretrained(files.folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    names = config.architectures or []
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise ValueError(
            f"config.json names the architectures {names}; allowed: a class of transformers. Give `build`, which makes a model."
        )
    config.dtype = torch.float32
    model: nn.Module = model_class(config)
    return model
