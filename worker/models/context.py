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

from octet.worker.kernels import document_attention
from octet.worker.mesh import Axis
from octet.worker.models.documents import Spans


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

    def ranges(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return the first token and the end of each of this rank's chunks, in sequences of so many tokens."""
        length = num_tokens // (2 * self.axis.size)
        return [(chunk * length, (chunk + 1) * length) for chunk in self.chunks]

    def attend(self, query_BHtd: Tensor, key_BHtd: Tensor, value_BHtd: Tensor, spans: Spans | None) -> Tensor:
        """Return causal attention of this rank's queries to all keys up to each, (B, H, t, d).

        spans: of each chunk, where documents divide sequences. Groups of query heads share a head of keys.
        """
        from torch.nn.attention.bias import causal_lower_right  # loads the compiler, which other jobs do not need

        keys_2BHTd = _Gathered.apply(torch.stack((key_BHtd, value_BHtd)), self.axis)
        mixed = []
        for index, (first, end) in enumerate(self.ranges(keys_2BHTd.shape[3])):
            query_BHcd = query_BHtd[:, :, index * (end - first) : (index + 1) * (end - first)]
            key_BHed, value_BHed = keys_2BHTd[:, :, :, :end].unbind()
            if spans is not None:
                mixed.append(document_attention(query_BHcd, key_BHed, value_BHed, *spans[index]))
            else:  # where flash attention runs, the causal mask takes no memory
                mask = causal_lower_right(end - first, end)
                mixed.append(attend_in_groups(query_BHcd, key_BHed, value_BHed, attn_mask=mask))
        return torch.cat(mixed, dim=2)


class CausalAttention(nn.Module):
    """Base of the attention of our families. context: this rank's part, where ranks divide the tokens of sequences."""

    context: ContextPart | None = None

    def attend(self, query_BHTd: Tensor, key_BHTd: Tensor, value_BHTd: Tensor, spans: Spans | None) -> Tensor:
        """Return each query's mean of the values up to it, (B, H, T, d). Groups of query heads share a head of keys.

        spans: of the documents that the sequences hold; None for one in each.
        """
        if self.context is not None:
            return self.context.attend(query_BHTd, key_BHTd, value_BHTd, spans)
        if spans is not None:
            return document_attention(query_BHTd, key_BHTd, value_BHTd, *spans[0])
        return attend_in_groups(query_BHTd, key_BHTd, value_BHTd, is_causal=True)


def attend_in_groups(query_BHcd: Tensor, key_BHed: Tensor, value_BHed: Tensor, **causal: Any) -> Tensor:
    """Return attention, (B, H, c, d), of groups of query heads that share a head of keys, which is not copied for each.

    causal: `is_causal`, or as `attn_mask` a causal bias, whose elements kernels do not need. Where kernels take no groups, one
    query head of each group attends at a time, and all of them read the same keys.
    """
    num_groups, attend = query_BHcd.shape[1] // key_BHed.shape[1], functional.scaled_dot_product_attention
    if num_groups == 1 or _takes_groups(query_BHcd, key_BHed, value_BHed):
        return attend(query_BHcd, key_BHed, value_BHed, enable_gqa=num_groups > 1, **causal)
    queries = query_BHcd.unflatten(1, (-1, num_groups)).unbind(2)
    return torch.stack([attend(query, key_BHed, value_BHed, **causal) for query in queries], 2).flatten(1, 2)


def _takes_groups(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if kernels take groups: on a CPU, and on CUDA where flash attention runs.

    CUDA's kernel for all other cases takes no groups: torch would copy the keys and hold the
    products of all tokens.
    """
    if query.device.type == "cpu":
        return True
    return bool(can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True)))


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
