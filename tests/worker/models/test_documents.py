"""Documents packed in one sequence: logits and losses are those of the documents alone, for ours and transformers' models."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octet.api_schemas.models import GPTSpec, LlamaSpec
from octet.api_schemas.models.architectures import KEEPS_DOCUMENTS_APART, TASKS
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.worker.models import TrainedModel, build_model
from octet.worker.models.cross_entropy import IGNORED
from octet.worker.models.documents import document_spans, document_starts, positions_in_documents
from tests.worker.models.test_architectures import CONFIGS, GROUPED, UNPADDED, VOCABULARY

LENGTHS = ((5, 1, 18), (10, 10, 4), (24,))
OURS = {"num_layers": 2, "num_heads": 4, "hidden_size": 64, "vocab_size": VOCABULARY, "max_sequence_length": 24}
IN_EVERY_RUN = ("llama", "gpt2")
TOLERANCE = 1e-5
"""fp32 sums in another order, relative to the largest logit. Models that mix documents are off by 1e-2 or more."""


def specs() -> list[Any]:
    ours = [GPTSpec(**OURS), LlamaSpec(**OURS, num_key_value_heads=2, intermediate_size=96)]
    cases = [pytest.param(spec, id=f"ours-{spec.family}") for spec in ours]
    for name in sorted(KEEPS_DOCUMENTS_APART):
        spec = HuggingFaceSpec(architecture=name, config=CONFIGS.get(name, GROUPED | UNPADDED))
        cases.append(pytest.param(spec, id=name, marks=() if name in IN_EVERY_RUN else pytest.mark.matrix))
    return cases


@pytest.mark.parametrize("spec", specs())
def test_packed_documents_are_computed_as_if_alone(spec: Any) -> None:
    torch.set_num_threads(1)
    model = build_model(spec, seed=0).eval()
    tokens_BT = torch.randint(3, 256, (len(LENGTHS), 24), generator=torch.Generator().manual_seed(1))
    documents_BD = document_starts(
        torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    )
    targets_BT = tokens_BT.roll(-1, 1).masked_fill(tokens_BT % 3 == 0, IGNORED)
    num_targets_B = (targets_BT != IGNORED).sum(1)
    with torch.no_grad():
        packed_BTV = model(tokens_BT, documents_BD)
        packed = model.loss(
            {"tokens": tokens_BT, "targets": targets_BT, "documents": documents_BD, "num_targets": num_targets_B}
        )
        loss_sum = torch.zeros(())
        for row, lengths in enumerate(LENGTHS):
            for places in torch.arange(24).split(list(lengths)):
                alone = _alone(model, tokens_BT[row : row + 1, places])
                error = (packed_BTV[row : row + 1, places] - alone).abs().max() / alone.abs().max()
                assert error < TOLERANCE
                loss_sum += torch.nn.functional.cross_entropy(
                    alone[0].float(), targets_BT[row, places], ignore_index=IGNORED, reduction="sum"
                )
    assert packed.num_targets == int(num_targets_B.sum())
    torch.testing.assert_close(packed.loss, loss_sum / packed.num_targets, rtol=1e-5, atol=1e-6)


def _alone(model: TrainedModel, tokens_1T: Tensor) -> Tensor:
    logits: Tensor = model(tokens_1T)
    return logits


def test_positions_and_masks_end_at_borders() -> None:
    documents_BD = document_starts(torch.tensor([[0, 0, 1, 2, 2, 2], [4, 4, 4, 4, 4, 4]]), num_starts=4)
    assert documents_BD.tolist() == [[0, 2, 3, 6], [0, 6, 6, 6]]
    assert positions_in_documents(documents_BD, 6).tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    (of_all,) = document_spans(documents_BD, [(0, 6)])
    assert of_all.query_starts.tolist() == of_all.key_starts.tolist() == [0, 2, 3, 6, 6, 12, 12, 12, 12]
    (of_part,) = document_spans(documents_BD, [(2, 4)])
    assert of_part.query_starts.tolist() == [0, 0, 1, 2, 2, 4, 4, 4, 4]
    assert of_part.key_starts.tolist() == [0, 2, 3, 4, 4, 8, 8, 8, 8]
    with pytest.raises(ValueError, match=r"documents is torch.int64 \(1, 6\); allowed: torch.int32"):
        positions_in_documents(torch.tensor([[0, 0, 1, 2, 2, 2]]), 6)


def test_only_decoders_keep_documents_apart() -> None:
    assert {TASKS[name] for name in KEEPS_DOCUMENTS_APART} == {"next_token"}
