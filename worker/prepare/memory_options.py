"""The options of a training that save memory, put into a converted model and its optimizer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from octet.api_schemas import TrainingSpec
from octet.worker.common.errors import InvalidConfig
from octet.worker.common.wrap import Nesting, Wrapper, wrap
from octet.worker.fp8.bf16 import HalfLinear, half_linear
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from octet.worker.models.blocks import repeated_blocks
from octet.worker.models.linear_cross_entropy import DeferredLogits
from octet.worker.optim import offload_optimizer, release_gradients
from octet.worker.prepare.blocks import CompileWatch, prepare_blocks
from octet.worker.prepare.residual_stream import keep_residual_in_bf16
from octet.worker.prepare.saved_activations import keep_activations_in_fp8


def prepare_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, training: TrainingSpec, device: torch.device
) -> CompileWatch | None:
    """Apply a job's options that save memory to a converted model and its optimizer. Returns None if nothing is compiled.

    Raises InvalidConfig for what only the rank can see: a model without blocks, or without a head that a loss can be fused to.
    """
    _check_blocks(model, training)
    try:
        if training.residual_stream == "bf16":
            keep_residual_in_bf16(model)
        if training.fused_loss:
            fuse_loss(model)
        if training.saved_activations == "fp8":
            keep_activations_in_fp8(model)
        if training.offload_optimizer:
            offload_optimizer(optimizer)
        if training.gradient_release:
            release_gradients(model, optimizer)
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    return prepare_blocks(model, training.activation_checkpointing, training.compile, device)


def _check_blocks(model: nn.Module, training: TrainingSpec) -> None:
    """Refuse options that would do nothing to a model without repeated blocks."""
    unset = {"compile": "off", "activation_checkpointing": "none"}
    found = {"compile": training.compile, "activation_checkpointing": training.activation_checkpointing}
    for name, value in found.items():
        if value not in (unset[name], "auto") and not repeated_blocks(model):
            raise InvalidConfig(
                f"training.{name} is {value}, and the model repeats no blocks; allowed: {unset[name]}, or models with an "
                f"nn.ModuleList or nn.Sequential of alike blocks. Remove training.{name}."
            )


def fuse_loss(model: nn.Module) -> None:
    """Let a model that predicts tokens compute its loss without the logits of all tokens (`linear_cross_entropy.py`).

    Call it after `initialize`. It takes our models, which have a `head`, and any network of transformers, bare or inside
    another module, by its `get_output_embeddings()`. While gradients are computed, the head returns `DeferredLogits` in the
    place of logits, and `loss`, or torch's cross entropy, takes them; without gradients it returns logits.
    Raises ValueError for a model whose head is no plain linear layer, and at levels that scale the loss. A network that
    computes with its logits raises LogitsAreRead, an InvalidConfig, in its first forward pass.
    """
    network = _network_of(model)
    head = getattr(model, "head", None) if network is None else network.get_output_embeddings()
    is_plain = (type(head) is nn.Linear or isinstance(head, HalfLinear)) and "forward" not in vars(head)
    if not isinstance(head, nn.Module) or not is_plain or head._forward_hooks or head._forward_pre_hooks:
        found = "none" if head is None else f"a {type(head).__name__}"
        raise ValueError(
            f"a fused loss needs a model's head, and found {found}; allowed: a linear layer in 16 bits or fp32, without hooks "
            "and adapters. Leave out fused_loss."
        )
    if STATE_BUFFER in dict(model.named_buffers()):
        raise ValueError(
            "a fused loss got a model that scales the gradient of its logits; allowed: other levels than fp16-amp. Use "
            "bf16-amp, or leave out fused_loss."
        )
    wrap(head, DeferredHead())
    (model if network is None else network).register_forward_hook(_check_logits)


class DeferredHead(Wrapper):
    """Returns what the logits are computed of in the place of a head's logits, while gradients are computed."""

    nesting = Nesting.LAYER

    def __call__(self, input: Tensor) -> Tensor | DeferredLogits:
        head: Any = self.module
        if not (torch.is_grad_enabled() and head.training):
            logits: Tensor = self.run(input)
            return logits
        weight_VD = head.weight.t() if getattr(head, "is_transposed", False) else head.weight
        return DeferredLogits(input, weight_VD, head.bias, _product_of(head))


def _product_of(head: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    if isinstance(head, HalfLinear):
        return partial(half_linear, bias=None, compute_dtype=head.compute_dtype)
    return functional.linear


def _network_of(model: nn.Module) -> Any:
    """Return the outermost module that has output embeddings, as transformers' networks with a head do, or None."""
    for module in model.modules():
        find_head = getattr(type(module), "get_output_embeddings", None)
        if find_head is not None and find_head(module) is not None:
            return module
    return None


def _check_logits(model: nn.Module, _inputs: Any, outputs: Any) -> None:
    """Reject a network that does not call its head as a layer, or not last."""
    if not (torch.is_grad_enabled() and model.training) or isinstance(outputs, DeferredLogits):
        return
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple) else ()
    if not any(isinstance(part, DeferredLogits) for part in parts):
        raise InvalidConfig(
            "training.fused_loss: the network returned logits, so it does not call its head as a layer; allowed: false for "
            "this model. Remove training.fused_loss."
        )


_check_logits.reads_no_tensors = True  # layers still compute the activations before them
