"""The mean cross entropy of a language model from the inputs of its head, without the logits of all tokens.

The logits of 8,192 tokens over 50,304 entries take 0.8 GB in bf16 while every activation is still alive. Here the forward pass
computes those of a few tokens at a time and keeps each token's log-sum-exp. The backward pass computes them again, for all
tokens and a few entries of the vocabulary at a time: so each row of the weight's gradient comes out of one product, and only
the gradient of the inputs is a sum over pieces, in fp32 (the idea is that of Wijmans et al. 2024, arXiv 2411.09009).
The head's products run once more than without.

Shape suffixes: N tokens, D hidden, V vocabulary; n some tokens, v some entries of the vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Product = Callable[[Tensor, Tensor], Tensor]
"""a (M, K) and b (N, K) to a @ b.T, in the dtypes in which the head multiplies."""

CHUNK_ELEMENTS = 1 << 24
"""Logits that exist at the same time: 64 MiB in fp32."""
ALIGNMENT = 128
"""Entries of the vocabulary in a piece are a multiple of this."""


class LaterLogits(NamedTuple):
    """What a head computes logits of, in their place. inputs: (…, D). weight: (V, D). bias: (V) or None."""

    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    multiply: Product

    def flatten(self, first_dim: int, last_dim: int) -> "LaterLogits":
        """Join dimensions of tokens, as `Tensor.flatten` does."""
        return self._replace(inputs=self.inputs.flatten(first_dim, last_dim))

    def at(self, positions_BP: Tensor) -> "LaterLogits":
        """Keep the tokens at some positions of each sequence. inputs: (B, T, D) to (B, P, D)."""
        index_BPD = positions_BP[..., None].expand(-1, -1, self.inputs.shape[-1])
        return self._replace(inputs=self.inputs.gather(1, index_BPD))


def linear_cross_entropy(logits: LaterLogits, targets_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """Return the mean cross entropy in nats, fp32 (). logits: of inputs (N, D).

    weights_N: each token's share of the mean, fp32; None for equal ones. A target of share 0 is in the vocabulary, too.
    """
    inputs_ND, weight_VD, bias_V, multiply = logits
    loss: Tensor = _LinearCrossEntropy.apply(inputs_ND, weight_VD, bias_V, targets_N, weights_N, multiply)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        weights_N: Tensor | None,
        multiply: Product,
    ) -> Tensor:
        num_tokens = len(inputs_ND)
        log_sums_N = torch.empty(num_tokens, device=inputs_ND.device)
        losses_N = torch.empty_like(log_sums_N)
        num_rows = max(1, CHUNK_ELEMENTS // len(weight_VD))
        for start in range(0, num_tokens, num_rows):
            rows = slice(start, start + num_rows)
            logits_nV = _with_bias(multiply(inputs_ND[rows], weight_VD), bias_V).float()
            log_sums_N[rows] = logits_nV.logsumexp(-1)
            losses_N[rows] = log_sums_N[rows] - logits_nV.gather(1, targets_N[rows, None]).squeeze(1)
        ctx.multiply = multiply
        ctx.save_for_backward(inputs_ND, weight_VD, bias_V, targets_N, weights_N, log_sums_N)
        return losses_N.mean() if weights_N is None else (losses_N * weights_N).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs_ND, weight_VD, bias_V, targets_N, weights_N, log_sums_N = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        num_tokens = len(inputs_ND)
        share_N = torch.full_like(log_sums_N, 1 / num_tokens) if weights_N is None else weights_N
        grad_N1 = (grad_output * share_N).float()[:, None]
        grad_inputs_ND = torch.zeros_like(inputs_ND, dtype=torch.float32) if needs_inputs else None
        grad_weight_VD = torch.empty_like(weight_VD) if needs_weight else None
        grad_bias_V = torch.empty_like(bias_V) if needs_bias and bias_V is not None else None
        num_columns = max(ALIGNMENT, CHUNK_ELEMENTS // num_tokens // ALIGNMENT * ALIGNMENT)
        for start in range(0, len(weight_VD), num_columns):
            columns = slice(start, start + num_columns)
            weight_vD = weight_VD[columns]
            logits_Nv = _with_bias(ctx.multiply(inputs_ND, weight_vD), None if bias_V is None else bias_V[columns])
            grad_Nv = (logits_Nv.float() - log_sums_N[:, None]).exp_().mul_(grad_N1)
            grad_Nv = _subtract_targets(grad_Nv, targets_N - start, grad_N1).to(logits_Nv.dtype)
            if grad_weight_VD is not None:
                grad_weight_VD[columns] = ctx.multiply(grad_Nv.t(), inputs_ND.t())
            if grad_bias_V is not None:
                grad_bias_V[columns] = grad_Nv.sum(0, dtype=torch.float32)
            if grad_inputs_ND is not None:
                grad_inputs_ND += ctx.multiply(grad_Nv, weight_vD.t())
        grad_inputs = None if grad_inputs_ND is None else grad_inputs_ND.to(inputs_ND.dtype)
        return grad_inputs, grad_weight_VD, grad_bias_V, None, None, None


def _with_bias(logits: Tensor, bias: Tensor | None) -> Tensor:
    return logits if bias is None else logits + bias.to(logits.dtype)


def _subtract_targets(grad_Nv: Tensor, places_N: Tensor, grad_N1: Tensor) -> Tensor:
    """Subtract each token's share at its target, if that is in this piece; in place. No device is waited for."""
    is_here_N = (places_N >= 0) & (places_N < grad_Nv.shape[1])
    places_N1 = places_N.clamp(0, grad_Nv.shape[1] - 1)[:, None]
    return grad_Nv.scatter_add_(1, places_N1, torch.where(is_here_N[:, None], -grad_N1, 0.0))
