"""The mean cross entropy of a language model from the inputs of its head, without the logits of all tokens.

The logits of 8,192 tokens over 50,304 entries take 0.8 GB in bf16 while every activation is still alive. Here both passes
compute those of a few entries of the vocabulary at a time, and the forward pass keeps each token's log-sum-exp. So each entry
of the weight is cast once in a pass, each row of its gradient comes out of one product, and only the gradient of the inputs is
a sum over pieces, in fp32 (the idea is that of Wijmans et al. 2024, arXiv 2411.09009). The head's products run once more.

Shape suffixes: N tokens, D hidden, V vocabulary, v some entries of the vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from octet.worker.common.errors import InvalidConfig

Product = Callable[[Tensor, Tensor], Tensor]
"""a (M, K) and b (N, K) to a @ b.T, in the dtypes in which the head multiplies."""

CHUNK_ELEMENTS = 1 << 24
"""Logits that exist at the same time: 64 MiB in fp32."""
ALIGNMENT = 128
"""Entries of the vocabulary in a piece are a multiple of this."""


class LogitsAreRead(InvalidConfig, AttributeError):
    """A network computes with its logits, which do not exist. An AttributeError for those who ask by `hasattr`."""

    def __init__(self, used: str) -> None:
        super().__init__(
            f"training.fused_loss: the network computes with its logits ({used}), or its loss does; those that scale or cap "
            "them do (config.logit_scale, logits_scaling, final_logit_softcapping); allowed: networks whose logits are what "
            "the head returns, and the mean or sum of functional.cross_entropy. Remove training.fused_loss, or leave out "
            "fuse_loss."
        )


class DeferredLogits(NamedTuple):
    """The operands of a head, returned instead of its logits. inputs: (…, D). weight: (V, D). bias: (V) or None.

    gather: makes the weight whole before a pass reads it, where ranks divide it.

    They go through what changes no logit and into torch's cross entropy, so the losses of transformers and of people take
    them. Any other use raises LogitsAreRead.
    """

    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    multiply: Product
    gather: Callable[[], None] | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return torch.Size((*self.inputs.shape[:-1], len(self.weight)))

    @property
    def device(self) -> torch.device:
        """The device that the logits would be on."""
        return self.inputs.device

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the logits, or one of its dimensions, as `Tensor.size` does."""
        return self.shape if dim is None else self.shape[dim]

    def flatten(self, first_dim: int, last_dim: int) -> "DeferredLogits":
        """Join dimensions of tokens, as `Tensor.flatten` does."""
        return self._replace(inputs=self.inputs.flatten(first_dim, last_dim))

    def view(self, *shape: int) -> "DeferredLogits":
        """Join or divide dimensions of tokens, as `Tensor.view` does."""
        if not shape or shape[-1] != len(self.weight):
            raise LogitsAreRead(f"view{shape} of {len(self.weight)} entries")
        return self._replace(inputs=self.inputs.reshape(*shape[:-1], self.inputs.shape[-1]))

    def contiguous(self) -> "DeferredLogits":
        """Return itself: logits that do not exist have no order in memory."""
        return self

    def float(self) -> "DeferredLogits":
        """Return itself: the loss is computed in fp32."""
        return self

    def to(self, target: Any) -> "DeferredLogits":
        """Return itself for fp32, in which the loss is computed, and for the device of the inputs."""
        if target not in (torch.float32, self.inputs.device):
            raise LogitsAreRead(f"to {target}")
        return self

    def at(self, positions_BP: Tensor) -> "DeferredLogits":
        """Keep the tokens at some positions of each sequence. inputs: (B, T, D) to (B, P, D)."""
        index_BPD = positions_BP[..., None].expand(-1, -1, self.inputs.shape[-1])
        return self._replace(inputs=self.inputs.gather(1, index_BPD))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor:
        """Compute torch's cross entropy; refuse every other function."""
        if function is not functional.cross_entropy or not isinstance(args[0], cls):
            raise LogitsAreRead(getattr(function, "__name__", str(function)))
        return _torch_cross_entropy(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise LogitsAreRead(name)

    def __getitem__(self, index: Any) -> Any:
        """Keep runs of tokens, as `logits[..., :-1, :]` does."""
        parts = index if isinstance(index, tuple) else (index,)
        is_of_tokens = len(parts) == self.inputs.ndim or Ellipsis in parts
        if not is_of_tokens or parts[-1] != slice(None) or not all(type(part) in (slice, type(...)) for part in parts):
            raise LogitsAreRead("a part of them")
        return self._replace(inputs=self.inputs[index])

    def __mul__(self, other: Any) -> Any:
        raise LogitsAreRead("a multiplication")

    def __rmul__(self, other: Any) -> Any:
        raise LogitsAreRead("a multiplication")

    def __truediv__(self, other: Any) -> Any:
        raise LogitsAreRead("a division")

    def __add__(self, other: Any) -> Any:
        raise LogitsAreRead("an addition")

    def __sub__(self, other: Any) -> Any:
        raise LogitsAreRead("a subtraction")


def _torch_cross_entropy(
    logits: DeferredLogits,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **unset: Any,
) -> Tensor:
    """Return `functional.cross_entropy` of logits (N, V) and targets (N), with its options where they keep logits whole."""
    options = {name: value for name, value in unset.items() if value is not None}
    if label_smoothing:
        options["label_smoothing"] = label_smoothing
    if reduction not in ("mean", "sum"):
        options["reduction"] = reduction
    if options or targets.is_floating_point():
        raise LogitsAreRead(f"cross entropy with {', '.join(options) or 'shares of several entries as targets'}")
    if logits.inputs.ndim != 2:
        raise LogitsAreRead(f"cross entropy of {tuple(logits.shape)}, not of (tokens, entries)")
    counts_N = targets != ignore_index
    weights_N = counts_N / counts_N.sum() if reduction == "mean" else counts_N.float()
    return linear_cross_entropy(logits, targets.where(counts_N, 0), weights_N)


def linear_cross_entropy(logits: DeferredLogits, targets_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """Return the mean cross entropy in nats, fp32 (). logits: of inputs (N, D).

    weights_N: each token's share of the mean, fp32; None for equal ones. A target of share 0 is in the vocabulary, too.
    """
    inputs_ND, weight_VD, bias_V, multiply, gather = logits
    loss: Tensor = _LinearCrossEntropy.apply(inputs_ND, weight_VD, bias_V, targets_N, weights_N, (multiply, gather))
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
        head: tuple[Product, Callable[[], None] | None],
    ) -> Tensor:
        multiply, gather = ctx.head = head
        if gather is not None:
            gather()
        log_sums_N = torch.full((len(inputs_ND),), -torch.inf, device=inputs_ND.device)
        none_NV = log_sums_N.new_zeros(()).expand(len(inputs_ND), len(weight_VD))
        target_logits_N = none_NV.gather(1, targets_N[:, None]).squeeze(1)  # refuses what is not in the vocabulary
        for columns in _pieces(len(inputs_ND), len(weight_VD)):
            logits_Nv = _logits(inputs_ND, weight_VD, bias_V, columns, multiply).float()
            log_sums_N = torch.logaddexp(log_sums_N, logits_Nv.logsumexp(-1))
            is_here_N, places_N1 = _places(targets_N, columns)
            target_logits_N += torch.where(is_here_N, logits_Nv.gather(1, places_N1).squeeze(1), 0.0)
        losses_N = log_sums_N - target_logits_N
        ctx.save_for_backward(inputs_ND, weight_VD, bias_V, targets_N, weights_N, log_sums_N)
        return losses_N.mean() if weights_N is None else (losses_N * weights_N).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        multiply, gather = ctx.head
        if gather is not None:
            gather()
        inputs_ND, weight_VD, bias_V, targets_N, weights_N, log_sums_N = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        share_N = torch.full_like(log_sums_N, 1 / len(inputs_ND)) if weights_N is None else weights_N
        grad_N1 = (grad_output * share_N).float()[:, None]
        grad_inputs_ND = torch.zeros_like(inputs_ND, dtype=torch.float32) if needs_inputs else None
        grad_weight_VD = torch.empty_like(weight_VD) if needs_weight else None
        grad_bias_V = torch.empty_like(bias_V) if needs_bias and bias_V is not None else None
        for columns in _pieces(len(inputs_ND), len(weight_VD)):
            logits_Nv = _logits(inputs_ND, weight_VD, bias_V, columns, multiply)
            grad_Nv = (logits_Nv.float() - log_sums_N[:, None]).exp_().mul_(grad_N1)
            is_here_N, places_N1 = _places(targets_N, columns)
            grad_Nv.scatter_add_(1, places_N1, torch.where(is_here_N[:, None], -grad_N1, 0.0))
            grad_Nv = grad_Nv.to(logits_Nv.dtype)
            if grad_weight_VD is not None:
                grad_weight_VD[columns] = multiply(grad_Nv.t(), inputs_ND.t())
            if grad_bias_V is not None:
                grad_bias_V[columns] = grad_Nv.sum(0, dtype=torch.float32)
            if grad_inputs_ND is not None:
                grad_inputs_ND += multiply(grad_Nv, weight_VD[columns].t())
        grad_inputs = None if grad_inputs_ND is None else grad_inputs_ND.to(inputs_ND.dtype)
        return grad_inputs, grad_weight_VD, grad_bias_V, None, None, None


def _pieces(num_tokens: int, vocab_size: int) -> Iterator[slice]:
    num_columns = max(ALIGNMENT, CHUNK_ELEMENTS // num_tokens // ALIGNMENT * ALIGNMENT)
    for start in range(0, vocab_size, num_columns):
        yield slice(start, min(start + num_columns, vocab_size))


def _logits(inputs_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, columns: slice, multiply: Product) -> Tensor:
    logits_Nv = multiply(inputs_ND, weight_VD[columns])
    return logits_Nv if bias_V is None else logits_Nv + bias_V[columns].to(logits_Nv.dtype)


def _places(targets_N: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return whether each target is in a piece, (N), and its place there, or some place, (N, 1). No device is waited for."""
    is_here_N = (targets_N >= columns.start) & (targets_N < columns.stop)
    return is_here_N, (targets_N - columns.start).clamp(0, columns.stop - columns.start - 1)[:, None]
