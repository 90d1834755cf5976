"""Several documents in one sequence: positions and attention that end at a document's border.

A batch says by "documents", int64 (B, T), to which document of its row each token belongs; a document's tokens are neighbours.
Shape suffixes: B sequences, T tokens.
"""

import torch
from torch import Tensor


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
