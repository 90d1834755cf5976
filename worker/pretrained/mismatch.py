"""Measure how far the files of an export are from what was trained: its mismatch card.

    evaluation   the trainer's evaluation, at the level and with its FP8 products   against   the files as served
    weights      the weights that the level multiplies, in the dtype of config.json against   the files as weights

The weights of a level are its codes times their scale, without the master weights or residuals that it also holds, so at O3
the second row is 0. As served: the network with the values that are read back from the files, rounded to the dtype of
config.json, and the inputs of converted layers in the codes that a server makes of them. Adapters: the network of the folder
that they belong to, with the adapters that are read back, or with the sums of both where they are merged. Sums are in fp32 on
the CPU, so that differences are those of weights and inputs; how a server's kernels round their 16-bit results is left out.

Shape suffixes: B samples, T tokens, V vocabulary or classes, P places whose logits are compared.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octet.api_schemas import ANY_FILE, Files, JobSpec, TokenInput
from octet.api_schemas.export import Divergence, MismatchCard
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.api_schemas.precision import PrecisionSpec
from octet.worker.fp8.weight import is_float8_weight
from octet.worker.models import TrainedModel, build_model
from octet.worker.models.cross_entropy import IGNORED
from octet.worker.models.initial import parameters_on_meta
from octet.worker.models.wrapped import WrappedModel
from octet.worker.prepare.adapters import NAME, adapters_of, add_adapters, attach_adapters
from octet.worker.prepare.export_state_dict import held_names
from octet.worker.pretrained.adapter import WEIGHTS, read_adapters
from octet.worker.pretrained.compressed import Fp8Form
from octet.worker.pretrained.files import PretrainedFiles
from octet.worker.pretrained.layouts import layout_of_model
from octet.worker.pretrained.load import FileSource
from octet.worker.pretrained.start import start_model
from octet.worker.pretrained.write import layers_in_codes, read_input_scales

CONFIG = "config.json"
_PIECE_ELEMENTS = 1 << 22
"""Logits that are compared at a time, in fp64."""

Batch = Mapping[str, Tensor]


@torch.no_grad()
def measure(
    model: nn.Module,
    job: JobSpec,
    folder: Path,
    form: Fp8Form,
    batches: Iterable[Batch],
    num_tokens: int,
    files: Files = ANY_FILE,
) -> MismatchCard:
    """Compare a trained model with the folder that was written of it, on held-out batches.

    model: at its level, on the CPU. job: which trained it. form: how servers use FP8 weights. num_tokens: the comparison ends
    with the batch that reaches so many. files: those that may be read of the folder that adapters belong to. Raises ValueError
    where the files are no network of the family, and where no batch has a token.
    """
    served, dtype_name, as_server = read_as_served(model, job, folder, form, files)
    expected = copy.deepcopy(served)
    if adapters_of(model) and not adapters_of(served):
        _adapt(expected, job)
    _put_values(expected, model)
    _round_to(expected.eval(), dtype_name)
    model.eval()
    evaluation, weights, digest = _Differences(), _Differences(), hashlib.sha256()
    for batch in batches:
        digest.update(batch["images" if "images" in batch else "tokens"].contiguous().numpy().tobytes())
        written_PV = logits_of(served, batch)
        weights.add(logits_of(expected, batch), written_PV)
        evaluation.add(logits_of(model, batch), as_server(batch) if form.activations != "none" else written_PV)
        if evaluation.num_places >= num_tokens:
            break
    return MismatchCard(
        num_tokens=evaluation.num_places,
        tokens_sha256=digest.hexdigest(),
        evaluation=evaluation.result(),
        weights=weights.result(),
    )


def read_as_served(
    model: nn.Module, job: JobSpec, folder: Path, form: Fp8Form, files: Files = ANY_FILE
) -> tuple[nn.Module, str, Callable[[Batch], Tensor]]:
    """Return the network of a folder, in fp32, the name of its weights' dtype, and what computes logits as a server would.

    Arguments are those of `measure`. The values are rounded to the dtype.
    """
    served, dtype_name = _read_served(model, job, folder, files)
    _round_to(served.eval(), dtype_name)
    if form.activations == "none":
        return served, dtype_name, partial(logits_of, served)
    input_scales = dict[str, float]()
    if form.activations == "static":
        input_scales = read_input_scales(model, PretrainedFiles(folder, Files.below((folder,))))
    return served, dtype_name, _server(served, layers_in_codes(model, layout_of_model(model, in_fp8=True)), form, input_scales)


def _read_served(model: nn.Module, job: JobSpec, folder: Path, files: Files) -> tuple[nn.Module, str]:
    """Return the network that a server has, in fp32, and the name of its weights' dtype: of adapters, that of their model."""
    if not (folder / WEIGHTS).exists():
        return read_network(model, job, folder), json.loads((folder / CONFIG).read_text())["dtype"]
    network, source = start_model(job.model, 0, files, precision=job.precision)
    if source is not None:
        source.finish(network, None)
    _adapt(network, job)
    read_adapters(network, folder)
    assert job.model.files is not None
    config = PretrainedFiles(Path(job.model.files), files).config
    return network, config.get("dtype") or config.get("torch_dtype") or "float32"


def _adapt(network: nn.Module, job: JobSpec) -> None:
    """Give a plain network adapters in fp32, whose values are still to come."""
    assert job.adapter is not None
    spec = job.adapter.model_copy(update={"dtype": "fp32"})
    add_adapters(network, spec, PrecisionSpec(level="fp32"), 0, torch.device("cpu"))
    attach_adapters(network)


def read_network(model: nn.Module, job: JobSpec, folder: Path) -> TrainedModel:
    """Return the network of a job, in fp32 on the CPU, with the values in a folder. Raises ValueError."""
    files, family = Files.below((folder,)), job.model
    if isinstance(model, WrappedModel):
        takes = family.sizes.takes
        mask_token = takes.mask_token if isinstance(takes, TokenInput) else None  # config.json does not have it
        network, source = start_model(
            HuggingFaceSpec(path=str(folder), mask_token=mask_token), 0, files, precision=job.precision
        )
    else:
        with parameters_on_meta():
            network = build_model(family, 0)
        source = FileSource(PretrainedFiles(folder, files), network, torch.device("cpu"))
    if source is not None:
        source.finish(network, None)
    return network


class _Differences:
    """Adds up the differences of logits (P, V), place by place."""

    def __init__(self) -> None:
        self.num_places = 0
        self._kl_divergence = self._num_agreeing = self._largest = 0.0

    def add(self, expected_PV: Tensor, found_PV: Tensor) -> None:
        rows = max(1, _PIECE_ELEMENTS // expected_PV.shape[-1])
        for one, other in zip(expected_PV.split(rows), found_PV.split(rows), strict=True):
            log_p, log_q = one.double().log_softmax(-1), other.double().log_softmax(-1)
            self._kl_divergence += float((log_p.exp() * (log_p - log_q)).sum())
            self._num_agreeing += float((one.argmax(-1) == other.argmax(-1)).sum())
            self._largest = max(self._largest, float((one.double() - other.double()).abs().max()))
            self.num_places += len(one)

    def result(self) -> Divergence:
        if not self.num_places:
            raise ValueError("the evaluation data has no token to compare; allowed: at least one. Hold out more data.")
        return Divergence(
            kl_divergence=max(0.0, self._kl_divergence / self.num_places),
            top1_agreement=self._num_agreeing / self.num_places,
            largest_logit_difference=self._largest,
        )


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits (P, V) of a batch, in fp32, where it has targets that count; of a masked batch those of all tokens."""
    if "images" in batch:
        return model(batch["images"]).float()
    logits_BTV = model(batch["tokens"], batch["documents"]) if "documents" in batch else model(batch["tokens"])
    targets = batch.get("targets")
    logits_PV = logits_BTV.float().flatten(0, 1)
    if targets is None or targets.shape != logits_BTV.shape[:-1]:
        return logits_PV
    return logits_PV[targets.flatten() != IGNORED]


def _server(
    network: nn.Module, converted: Iterable[str], form: Fp8Form, input_scales: Mapping[str, float]
) -> Callable[[Batch], Tensor]:
    """Return what computes a batch's logits with the inputs of converted layers as a server has them."""
    layers = {network.get_submodule(name): input_scales.get(name) for name in converted}

    def as_served(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (form.as_served(inputs[0], layers[layer]), *inputs[1:])

    def compute(batch: Batch) -> Tensor:
        hooks = [layer.register_forward_pre_hook(as_served) for layer in layers]
        try:
            return logits_of(network, batch)
        finally:
            for hook in hooks:
                hook.remove()

    return compute


def _round_to(network: nn.Module, dtype_name: str) -> None:
    """Round the parameters to the dtype of a config.json, as servers hold them. Buffers, such as frequencies, stay.

    Adapters stay too: they have a dtype of their own.
    """
    dtype = getattr(torch, dtype_name)
    for name, parameter in network.named_parameters():
        if not name.startswith(f"{NAME}."):
            parameter.copy_(parameter.to(dtype))


def _put_values(network: nn.Module, trained: nn.Module) -> None:
    """Copy the weights that a trained model multiplies with into a plain network of the same names."""
    places = held_names(network)
    for name, held in held_names(trained).items():
        places[name].copy_(held.codes.float() * held.dequant_scale if is_float8_weight(held) else held)
