"""Write a trained model as a Hugging Face checkpoint: bf16 or fp32 values, or FP8 codes that stay as they were trained."""

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octet.worker.fp8.bf16 import HalfLinear
from octet.worker.fp8.convert import ConversionReport
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.recipe import E4M3
from octet.worker.fp8.stacks import stacks_of
from octet.worker.fp8.weight import is_float8_weight
from octet.worker.kernels.formats import BLOCK
from octet.worker.models.wrapped import WrappedModel
from octet.worker.prepare.export_state_dict import join, plain_tensors, reader_of
from octet.worker.pretrained import folder as shards
from octet.worker.pretrained.compressed import (
    ACTIVATIONS,
    INPUT_SCALE,
    KINDS,
    LAYOUTS,
    WEIGHTS_ONLY,
    CompressedWeight,
    Fp8Form,
    compress,
    over_blocks,
    quantization_config,
)
from octet.worker.pretrained.files import PretrainedFiles
from octet.worker.pretrained.folder import MappedValues, ShardWriter, check_new, new_folder
from octet.worker.pretrained.layouts import Layout, NamesOfTransformers, experts_in_file, layout_of_model

PLAIN_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS = (*PLAIN_DTYPES, "fp8")
Tensors = Iterator[tuple[str, Tensor]]
"""The tensors of a file by their names there, made one at a time."""


def export(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: str | Path,
    *,
    format: str = "bf16",
    strategy: str | None = None,
    plain_dtype: torch.dtype = torch.bfloat16,
    form: Fp8Form = WEIGHTS_ONLY,
) -> Path:
    """Write `config.json` and safetensors that transformers' `from_pretrained` loads; returns the folder.

    model: of transformers, or one of our families (`layouts.py`), plain or initialized. optimizer: its master weights are
    taken where it holds any. format: "bf16" and "fp32" write values, every floating-point tensor in that dtype; "fp8" writes
    the converted layers in the form of compressed-tensors (`compressed.py`), everything else in `plain_dtype`.
    strategy: of FP8 scales: "tensor", "channel" or "block"; by default that in which the level holds or multiplies the weight.
    form: the layout of FP8 weights, and what a server does with activations.
    Apart from the model this holds one weight in fp32 and one file's tensors (1 GiB) at a time.
    Where ranks divide the model all of them call it together; rank 0 writes, and the others write nothing.
    E4M3 codes are written byte for byte with their scale under the default strategy; the rest is quantized from the finest
    values.

    Raises ValueError for a model that cannot be written like this, and for a folder that is not empty; StorageFull.
    """
    folder = Path(folder)
    layout = layout_of_model(model, in_fp8=format == "fp8")
    is_writer = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    if is_writer:
        check_new(folder)
    check_form(model, format, strategy, form)
    if (form.activations == "static") != bool(form.input_scales):
        raise ValueError(
            f"form has activations {form.activations} and {len(form.input_scales)} input_scales; allowed: scales with static "
            "activations alone. Find them with octet.worker.pretrained.Calibration, or change the form."
        )
    if format == "fp8":
        strategy = strategy or _strategy_of(model, form)
        tensors = _each(_in_fp8(model, strategy, layout, form), lambda name, tensor: (name, _cast(tensor, name, plain_dtype)))
        quantization = quantization_config(strategy, _ignored(model, layout), form)
        extra = {"dtype": _name(plain_dtype), "quantization_config": quantization}
    else:
        dtype = PLAIN_DTYPES[format]
        tensors = _each(
            plain_tensors(model, dtype=dtype),
            lambda name, tensor: (layout.rename(name), layout.to_file(name, _cast(tensor, name, dtype))),
        )
        extra = {"dtype": _name(dtype)}
    if not is_writer:
        deque(tensors, maxlen=0)  # takes part in what ranks read together
        return folder
    with new_folder(folder) as unfinished:
        _write(model, tensors, unfinished, layout, extra)
    return folder


def check_form(model: nn.Module, format: str, strategy: str | None = None, form: Fp8Form = WEIGHTS_ONLY) -> None:
    """Refuse what cannot be written, before anything is. Raises ValueError."""
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; allowed: {', '.join(FORMATS)}.")
    if format == "fp8" and any(stack.is_divided for stack in stacks_of(model)):
        raise ValueError(
            'format "fp8" writes codes, and ranks hold different experts of the model; allowed: "bf16" and "fp32", which '
            "gather stacks of values. Export a checkpoint, which has the experts of all ranks, or use one of these."
        )
    layout = layout_of_model(model, in_fp8=format == "fp8")
    if layout.config is None and not callable(getattr(type(_network(model)), "save_pretrained", None)):
        raise ValueError(
            f"{type(model).__name__} has no form in transformers; allowed: transformers' models and the families gpt and "
            "llama. Use plain_state_dict, and save that."
        )
    if strategy is not None and (format != "fp8" or strategy not in KINDS):
        raise ValueError(f'strategy is {strategy!r} for {format}; allowed: {", ".join(KINDS)}, with format "fp8" alone.')
    _check_fp8_form(format, strategy, form)
    if format != "fp8":
        return
    if not layers_in_codes(model, layout):
        raise ValueError('format "fp8" writes converted layers; the model has none. Initialize it at a level, or use "bf16".')
    transposed = [name for name in layers_in_codes(model, layout) if getattr(model.get_submodule(name), "is_transposed", False)]
    if transposed:
        raise ValueError(
            f"{transposed[0]} and {len(transposed) - 1} more layers are Conv1D, which compressed-tensors does not quantize; "
            'allowed: models of nn.Linear. Use format "bf16".'
        )
    if form.is_of_blocks:
        for name in layers_in_codes(model, layout):
            num_inputs = model.get_parameter(join(name, "weight")).shape[1]
            if num_inputs % BLOCK:
                raise ValueError(
                    f"{name} has {num_inputs} inputs; allowed with layout {form.layout}: multiples of {BLOCK}, by which "
                    "servers scale them. Exclude it in precision.exclude, or use layout compressed-tensors."
                )


def _check_fp8_form(format: str, strategy: str | None, form: Fp8Form) -> None:
    if form.layout not in LAYOUTS or form.activations not in ACTIVATIONS:
        raise ValueError(f"form is {form}; allowed: layout {', '.join(LAYOUTS)}, activations {', '.join(ACTIVATIONS)}.")
    if format != "fp8" and form != WEIGHTS_ONLY:
        raise ValueError(f'form is {form} for {format}; allowed: with format "fp8" alone. Leave it out.')
    if form.activations == "static" and strategy == "block":
        raise ValueError(
            "strategy is block with static activations; allowed: tensor or channel, which servers have with them. Change one."
        )
    if form.is_of_blocks and (strategy not in (None, "block") or form.activations != "dynamic"):
        raise ValueError(
            f"form is {form} with strategy {strategy}; allowed: strategy block and activations dynamic, the only ones that "
            "the layout has. Change them, or the layout."
        )


def _converted(model: nn.Module) -> Collection[str]:
    """Return the names of the layers that a level has converted."""
    report = getattr(model, "octet_report", None)
    return report.converted if isinstance(report, ConversionReport) else ()


def layers_in_codes(model: nn.Module, layout: Layout) -> list[str]:
    """Return the layers that are written as codes: the converted ones, but experts that files hold in stacks."""
    experts = experts_in_file(model, layout)
    return [name for name in _converted(model) if experts.get(name) != []]


def _strategy_of(model: nn.Module, form: Fp8Form) -> str:
    """The strategy that loses nothing: a tensor's where codes are held, else that of the products' weight scales.

    Of static activations it is no strategy of blocks, which servers do not have with them.
    """
    if form.is_of_blocks:
        return "block"
    layer = model.get_submodule(next(iter(_converted(model))))
    if not isinstance(layer, Float8Linear) or (layer.encoded is not None and layer.encoded.codes.dtype == E4M3):
        return "tensor"
    found = next(strategy for strategy, kind in KINDS.items() if kind is layer.recipe.weight.kind)
    return "channel" if found == "block" and form.activations == "static" else found


def _in_fp8(model: nn.Module, strategy: str, layout: Layout, form: Fp8Form) -> Tensors:
    """Yield the tensors under the file's names. One weight at a time is decoded."""
    in_codes, reader = layers_in_codes(model, layout), reader_of(model)
    experts = {name: parts for name, parts in experts_in_file(model, layout).items() if parts}
    leave_out, wide = {join(name, "weight") for name in (*in_codes, *experts)}, experts.keys() - set(in_codes)
    for name, tensor in plain_tensors(model, leave_out=leave_out):
        yield layout.rename(name), layout.to_file(name, tensor)
    for name, parts in experts.items():
        if name in wide:
            values = reader.values(model.get_parameter(join(name, "weight")))
            yield from zip(parts, values.chunk(len(parts)), strict=True)
    for name in in_codes:
        theirs = experts.get(name) or [join(layout.rename_module(name), "weight")]
        for part, (codes, scale) in zip(theirs, _compressed(model, name, strategy, layout, form, len(theirs)), strict=True):
            yield part, codes
            yield part.removesuffix("weight") + form.scale_name, scale
            if form.input_scales:
                yield part.removesuffix("weight") + INPUT_SCALE, torch.tensor([form.input_scales[name]])


def read_input_scales(model: nn.Module, files: PretrainedFiles) -> dict[str, float]:
    """Return the scale of each converted layer's inputs in a folder that was written of the model. Raises ValueError."""
    layout, experts = layout_of_model(model, in_fp8=True), experts_in_file(model, layout_of_model(model, in_fp8=True))
    names, found = NamesOfTransformers(model), {}
    for name in layers_in_codes(model, layout):
        part = (experts.get(name) or [join(layout.rename_module(name), "weight")])[0]
        stored = names.in_file(part.removesuffix("weight") + INPUT_SCALE)
        found[name] = float(files.read_of_server(stored))
    return found


def _compressed(
    model: nn.Module, name: str, strategy: str, layout: Layout, form: Fp8Form, num_parts: int
) -> list[CompressedWeight]:
    """Return a weight by parts of its rows."""
    weight_name = join(name, "weight")
    weight, reader = model.get_parameter(weight_name), reader_of(model)
    if is_float8_weight(weight) and weight.codes.dtype == E4M3 and (strategy == "tensor" or form.is_of_blocks):
        codes = layout.to_file(weight_name, reader.codes(weight).view(torch.uint8)).view(E4M3)
        held = [CompressedWeight(part, weight.dequant_scale.detach().reshape(1)) for part in codes.chunk(num_parts)]
        return [over_blocks(part) for part in held] if form.is_of_blocks else held
    values = layout.to_file(weight_name, reader.values(weight).float())
    return [compress(part, strategy) for part in values.chunk(num_parts)]


def _ignored(model: nn.Module, layout: Layout) -> list[str]:
    """The file's names of the linear layers that hold no codes. To a server the routers of mixtures are such layers."""
    in_codes, experts = set(layers_in_codes(model, layout)), experts_in_file(model, layout)
    names, ignored = NamesOfTransformers(model), dict[str, None]()
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        is_router = weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)
        if name in in_codes or not (is_router or isinstance(module, (nn.Linear, HalfLinear, Float8Linear))):
            continue
        held_by = name.rsplit(".", 2)[0] if experts.get(name) == [] else name
        for theirs in experts.get(name) or [join(layout.rename_module(held_by), "weight")]:
            both = (theirs, names.in_file(theirs))
            ignored |= dict.fromkeys(one.removesuffix(".weight") for one in both)
    return list(ignored)


def _each(tensors: Tensors, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> Tensors:
    """Yield the changed tensors. None is alive while the next one is made, unless the caller keeps it."""
    for name, tensor in tensors:
        changed = [change(name, tensor)]
        del tensor
        yield changed.pop()


def _cast(tensor: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Values in the wanted dtype. Codes, their scales and whole numbers stay."""
    is_of_codes = tensor.dtype == E4M3 or name.endswith((".weight_scale", ".weight_scale_inv", f".{INPUT_SCALE}"))
    return tensor if is_of_codes or not tensor.is_floating_point() else tensor.to(dtype)


def _write(model: nn.Module, tensors: Tensors, folder: Path, layout: Layout, extra: dict[str, Any]) -> None:
    """Write the tensors, and a config.json with `extra` in it. A tied head is left out, as transformers expects.

    transformers renames and joins the tensors of its models when it has all of them: until then they lie in files.
    """
    if layout.config is None:
        model = _network(model)
        before = {name: getattr(model.config, name, None) for name in ("architectures", "dtype")}
        values = MappedValues(folder)
        state = dict(_each(tensors, lambda name, tensor: (name, values.hold(tensor))))
        type(model).save_pretrained(model, folder, state_dict=state, max_shard_size=shards.SHARD_BYTES)  # sets both
        vars(model.config).update(before)
        config = json.loads((folder / "config.json").read_text())
    else:
        config = dict(layout.config)
        writer = ShardWriter(folder)
        for name, tensor in tensors:
            if name != "lm_head.weight" or not config["tie_word_embeddings"]:
                writer.add(name, tensor)
            del tensor  # before the next one is made
        writer.finish()
    (folder / "config.json").write_text(json.dumps(config | extra, indent=2) + "\n")


def _network(model: nn.Module) -> Any:
    """Return the model of transformers inside ours."""
    return model.network if isinstance(model, WrappedModel) else model


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
