"""Several documents in one sequence: positions and attention that end at a document's border.

A batch says by "documents", int64 (B, T), to which document of its row each token belongs; a document's tokens are neighbours.
Shape suffixes: B sequences, T tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_documents: ContextVar[tuple[Tensor | None] | None] = ContextVar("documents", default=None)


def positions_in_documents(documents_BT: Tensor) -> Tensor:
    """Return each token's position in its document, from 0, int64 (B, T)."""
    places_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return places_T - torch.where(begins_BT, places_T, 0).cummax(1).values


def attention_mask(documents_BT: Tensor) -> Tensor:
    """Return True where a token (row) may attend to another (column): its own document up to itself, bool (B, 1, T, T).

    T² bytes for each sequence: 4 MiB at 2,048 tokens.
    """
    is_same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return is_same_BTT.tril()[:, None]


@contextmanager
def documents_known(documents_BT: Tensor | None) -> Iterator[None]:
    """Inside, transformers masks by these documents (B, T), or by none, and does not look for them in the positions.

    It would read a value of the device in each forward pass, and ask for a mask in place of causal attention in a CUDA graph.
    """
    _let_transformers_ask()
    token = _documents.set((documents_BT,))
    try:
        yield
    finally:
        _documents.reset(token)


def _let_transformers_ask() -> None:
    """Put a function in front of transformers' own, which runs wherever no documents are known: in a user's own models."""
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices
    if getattr(find, "asks_octet", False):
        return

    def documents_or_found(position_ids: Tensor) -> Tensor | None:
        known = _documents.get()
        found: Tensor | None = known[0] if known is not None else find(position_ids)
        return found

    documents_or_found.asks_octet = True
    masking_utils.find_packed_sequence_indices = documents_or_found
