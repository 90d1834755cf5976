"""torch's own attention, `nn.MultiheadAttention`, by linear layers that a level converts as any others.

It keeps the projections of queries, keys and values in one parameter, `in_proj_weight` (3E, E), and multiplies by functions.
Here each projection is a layer, `in_proj.0` to `in_proj.2`, and `out_proj` is called. torch's fast path, which evaluates by
one function that reads all weights, is left alone: `in_proj_bias` is None. Shape suffixes: N sequences, L queries, S keys,
E features, H heads, D features of a head.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from octet.api_schemas.precision import PrecisionSpec
from octet.worker.common.deferred import is_deferred
from octet.worker.common.wrap import Nesting, Wrapper, wrapper_of, wrappers_of
from octet.worker.fp8.casts import TRAINABLE_DTYPES
from octet.worker.fp8.stacks import Replaced, StackedLinears, split_parameter, unstack


class InProjection(StackedLinears):
    """The projections of queries, keys and values."""

    is_flat: ClassVar[bool] = True
    suffixes: ClassVar[dict[str, str]] = {"weight": "_weight", "bias": "_bias"}


class AttentionForward(Wrapper):
    """Computes attention as torch does, by linear layers."""

    nesting = Nesting.LAYER

    def __call__(  # noqa: PLR0913 - torch's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the module's own forward does. Raises RuntimeError as it does for a hint without a mask."""
        module: Any = self.module
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, which is None. Pass the causal mask as well.")
        is_batched = query.dim() == 3
        is_swapped = is_batched and not module.batch_first
        query_NHLD, key_NHSD, value_NHSD = self._projected((query, key, value), is_batched=is_batched, is_swapped=is_swapped)
        if key_padding_mask is not None and not is_batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        is_hint_enough = is_causal and key_padding_mask is None and not need_weights
        mask = None if is_hint_enough else _mask(query_NHLD, attn_mask, key_padding_mask)
        dropout, weights_NHLS = module.dropout if module.training else 0.0, None
        if need_weights:
            output_NHLD, weights_NHLS = _with_weights(query_NHLD, key_NHSD, value_NHSD, mask, dropout)
            weights_NHLS = weights_NHLS.mean(1) if average_attn_weights else weights_NHLS
        else:
            attend = functional.scaled_dot_product_attention
            output_NHLD = attend(query_NHLD, key_NHSD, value_NHSD, mask, dropout, is_hint_enough)
        output = output_NHLD.transpose(1, 2).flatten(2)
        output = module.out_proj(output.transpose(0, 1) if is_swapped else output)
        if is_batched:
            return output, weights_NHLS
        return output.squeeze(0), None if weights_NHLS is None else weights_NHLS.squeeze(0)

    def _projected(self, tokens: tuple[Tensor, ...], *, is_batched: bool, is_swapped: bool) -> list[Tensor]:
        """Return queries, keys and values by head, (N, H, L or S, D)."""
        module: Any = self.module
        heads = []
        for layer, each in zip(module.in_proj, tokens, strict=True):
            # Layers that read the same tensor share its codes, so it is transposed after them.
            output = layer(each) if is_batched else layer(each).unsqueeze(0)
            output = output.transpose(0, 1) if is_swapped else output
            heads.append(output.unflatten(-1, (module.num_heads, -1)).transpose(1, 2))
        return heads


def unstack_attention(
    model: nn.Module, precision: PrecisionSpec, optimizer: torch.optim.Optimizer | None = None, *, without_values: bool = False
) -> None:
    """Hold the projections of torch's own attention as linear layers, for a level that multiplies in FP8.

    Nothing happens at other levels, and a second time. Attention whose keys or values have other widths, or a bias of their
    own, stays as it is. The optimizer follows, as in `stacks.unstack`.
    without_values: also on `meta`, for who draws the values of a stack later.
    """
    if precision.storage.gemm != "fp8":
        return
    found = [module for module in model.modules() if _is_plain_attention(module, without_values=without_values)]
    unstack(found, _take_apart, AttentionForward, optimizer)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(computes_by_layers(part) for part in module.modules()):
            module.use_nested_tensor = False  # nested tensors are for torch's fast path alone


def computes_by_layers(module: nn.Module) -> bool:
    """Return True for attention whose projections are linear layers."""
    return wrapper_of(module, AttentionForward) is not None


def _is_plain_attention(module: nn.Module, *, without_values: bool) -> bool:
    """Return True for attention of torch's own class that nobody has changed, and whose parameters have values.

    without_values: they may be on `meta`.
    """
    if type(module) is not nn.MultiheadAttention or module._parameters.get("in_proj_weight") is None:
        return False
    weight = module.get_parameter("in_proj_weight")
    observed = [*vars(module).items(), *vars(module.out_proj).items()]
    return (
        module.bias_k is None
        and not module.add_zero_attn
        and weight.dtype in TRAINABLE_DTYPES
        and (without_values or not weight.is_meta)
        and not is_deferred(weight)
        and not any(hooks for attribute, hooks in observed if "_hooks" in attribute and hooks)
        and type(weight) is nn.Parameter
        and "parametrizations" not in module._modules
        and ("forward" not in vars(module) or bool(wrappers_of(module)))
    )


def _take_apart(module: nn.Module, replaced: Replaced) -> None:
    """Put a list of linear layers in the place of a projection's parameters. These are None from then on."""
    attention: Any = module
    width = attention.embed_dim
    weights = split_parameter(module, "in_proj_weight", replaced, width)
    biases: list[Any] = [None] * len(weights)
    if attention.in_proj_bias is not None:
        biases = split_parameter(module, "in_proj_bias", replaced, width)
    module.register_parameter("in_proj_weight", None)
    module.register_parameter("in_proj_bias", None)
    projection = InProjection()
    for weight, bias in zip(weights, biases, strict=True):
        linear = nn.Linear(width, width, bias=False, device="meta")
        linear.weight, linear.bias = weight, bias
        projection.append(linear)
    attention.in_proj = projection.train(module.training)


def _mask(query_NHLD: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """Return what is added to the products of queries and keys, in their dtype and (N or 1, H or 1, L or 1, S).

    True in a mask of torch.bool shuts out; both masks may be numbers instead.
    """
    masks = []
    if attn_mask is not None:
        is_by_head = attn_mask.dim() == 3 and len(attn_mask) > 1
        by_head = query_NHLD.shape[:2] if is_by_head else (1, 1)
        masks.append(attn_mask.reshape(*by_head, *attn_mask.shape[-2:]))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    added = [_as_added(mask, query_NHLD.dtype) for mask in masks]
    return sum(added[1:], start=added[0]) if added else None


def _as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf) if mask.dtype == torch.bool else mask.to(dtype)


def _with_weights(
    query_NHLD: Tensor, key_NHSD: Tensor, value_NHSD: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Return attention, and its weights as they were dropped."""
    scores_NHLS = query_NHLD * query_NHLD.shape[-1] ** -0.5 @ key_NHSD.mT
    weights_NHLS = functional.softmax(scores_NHLS if mask is None else scores_NHLS + mask, dim=-1)
    weights_NHLS = functional.dropout(weights_NHLS, dropout) if dropout else weights_NHLS
    return weights_NHLS @ value_NHSD, weights_NHLS
