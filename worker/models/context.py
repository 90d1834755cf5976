"""Context parallelism: ranks divide the tokens of each sequence, and attend to the keys and values of all of them.

Of 2N equal chunks of a sequence, rank i of N has the chunks i and 2N - 1 - i, so that causal attention is the same work on each
rank: 2N + 1 products of chunks. Keys and values of all tokens are gathered, and their gradients are added up into each rank's
tokens, in fp32 in the order of the ranks (Llama 3, arXiv 2407.21783, sec. 3.3.2). They wait for the backward pass, unless
blocks are checkpointed, which gathers them again. All else of a network works on each token by itself.

Shape suffixes: B sequences, T tokens of a whole sequence, t this rank's tokens, H heads, d elements of a head, R ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

from octet.worker.mesh import Axis


class ContextPart:
    """This rank's tokens of each sequence."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of this rank's chunks, in order."""
        return _chunks(self.axis.rank, self.axis.size)

    def own(self, whole: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's tokens, in order. dim: of the tokens. Raises ValueError for a length that does not divide."""
        num_chunks, length = 2 * self.axis.size, whole.shape[dim]
        if length % num_chunks:
            raise ValueError(
                f"a sequence has {length} tokens; allowed with context {self.axis.size}: multiples of {num_chunks}, since each "
                "rank has two chunks. Change the sequence length or the degree."
            )
        chunks = whole.chunk(num_chunks, dim)
        first, second = self.chunks
        return torch.cat((chunks[first], chunks[second]), dim)

    def attend(self, query_BHtd: Tensor, key_BHtd: Tensor, value_BHtd: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        """Return causal attention of this rank's queries to all keys up to each, (B, H, t, d).

        mask_B1TT: of the whole sequences, where documents divide them. Groups of query heads share a head of keys.
        """
        from torch.nn.attention.bias import causal_lower_right  # loads the compiler, which other jobs do not need

        keys_2BHTd = _Gathered.apply(torch.stack((key_BHtd, value_BHtd)), self.axis)
        mixed = []
        for chunk, query_BHcd in zip(self.chunks, query_BHtd.chunk(2, dim=2), strict=True):
            length = query_BHcd.shape[2]
            rows, end = slice(chunk * length, (chunk + 1) * length), (chunk + 1) * length
            key_BHed, value_BHed = keys_2BHTd[:, :, :, :end].unbind()
            # Where flash attention runs, the causal one takes no memory
            mask: Any = causal_lower_right(length, end) if mask_B1TT is None else mask_B1TT[:, :, rows, :end]
            mixed.append(attend_in_groups(query_BHcd, key_BHed, value_BHed, mask, has_mask=mask_B1TT is not None))
        return torch.cat(mixed, dim=2)


class CausalAttention(nn.Module):
    """Base of the attention of our families. context: this rank's part, where ranks divide the tokens of sequences."""

    context: ContextPart | None = None

    def attend(self, query_BHTd: Tensor, key_BHTd: Tensor, value_BHTd: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        """Return each query's mean of the values up to it, (B, H, T, d). Groups of query heads share a head of keys.

        mask_B1TT: True where a token may attend to another; None for all before it and itself.
        """
        if self.context is not None:
            return self.context.attend(query_BHTd, key_BHTd, value_BHTd, mask_B1TT)
        num_groups = query_BHTd.shape[1] // key_BHTd.shape[1]
        if (
            mask_B1TT is not None and num_groups > 1
        ):  # on CUDA only the flash and the math kernel take groups, and flash no mask
            key_BHTd, value_BHTd = (heads.repeat_interleave(num_groups, dim=1) for heads in (key_BHTd, value_BHTd))
        return functional.scaled_dot_product_attention(
            query_BHTd, key_BHTd, value_BHTd, attn_mask=mask_B1TT, is_causal=mask_B1TT is None, enable_gqa=num_groups > 1
        )


def attend_in_groups(query_BHcd: Tensor, key_BHed: Tensor, value_BHed: Tensor, mask: Any, *, has_mask: bool) -> Tensor:
    """Return attention, (B, H, c, d), of groups of query heads that share a head of keys, which is not copied for each.

    mask: as torch's attention takes it. has_mask: False for a causal bias, whose elements kernels
    do not need. Where kernels take no groups, one query head of each group attends at a time, and
    all of them read the same keys.
    """
    num_groups, attend = query_BHcd.shape[1] // key_BHed.shape[1], functional.scaled_dot_product_attention
    if num_groups == 1 or _takes_groups(query_BHcd, key_BHed, value_BHed, has_mask=has_mask):
        return attend(query_BHcd, key_BHed, value_BHed, attn_mask=mask, enable_gqa=num_groups > 1)
    queries = query_BHcd.unflatten(1, (-1, num_groups)).unbind(2)
    return torch.stack([attend(query, key_BHed, value_BHed, attn_mask=mask) for query in queries], 2).flatten(1, 2)


def _takes_groups(query: Tensor, key: Tensor, value: Tensor, *, has_mask: bool) -> bool:
    """Return True if kernels take groups: on a CPU, and on CUDA where flash attention runs, which takes no mask.

    CUDA's kernel for all other cases takes no groups: torch would copy the keys and hold the
    products of all tokens.
    """
    if query.device.type == "cpu":
        return True
    return not has_mask and bool(can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True)))


class _Gathered(torch.autograd.Function):
    """Keys and values of all tokens, in order; the gradients of each rank's own are added up."""

    @staticmethod
    def forward(ctx: Any, own_2BHtd: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        gathered_R2BHtd = axis.start_gather(own_2BHtd).wait()
        return torch.cat(_in_order([part.chunk(2, dim=3) for part in gathered_R2BHtd], axis.size), dim=3)

    @staticmethod
    def backward(ctx: Any, grad_2BHTd: Tensor) -> tuple[Tensor, None]:
        axis: Axis = ctx.axis
        chunks = grad_2BHTd.chunk(2 * axis.size, dim=3)
        parts = [
            torch.cat((chunks[first], chunks[second]), dim=3)
            for first, second in (_chunks(rank, axis.size) for rank in range(axis.size))
        ]
        return axis.sum_shares(torch.stack(parts).flatten(1)).view(parts[0].shape), None


def _chunks(rank: int, num_ranks: int) -> tuple[int, int]:
    return rank, 2 * num_ranks - 1 - rank


def _in_order(halves: list[tuple[Tensor, ...]], num_ranks: int) -> list[Tensor]:
    """The chunks of a sequence in order. halves: the two of each rank."""
    return [halves[rank][0] for rank in range(num_ranks)] + [halves[rank][1] for rank in reversed(range(num_ranks))]
