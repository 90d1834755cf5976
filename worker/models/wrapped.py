"""Networks of transformers as the training loop sees them: one class for each task, with the loss computed by our code.

The loss comes from calling the wrapper, so that hooks of the whole model, as fp16's loss scaling, see its output.
Shape suffixes: B samples, T tokens, P predicted tokens of each sequence, V vocabulary, K classes; C channels, H height and
W width of an image.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from octet.api_schemas import Task
from octet.api_schemas.models.architectures import POSITIONS_AFTER_PADDING
from octet.worker.models.cross_entropy import cross_entropy
from octet.worker.models.documents import positions_in_documents
from octet.worker.models.language import checked_length, next_token_losses, token_losses
from octet.worker.models.linear_cross_entropy import DeferredLogits
from octet.worker.models.model import Losses, TensorRole, TrainedModel
from octet.worker.models.transformers_attention import attend_by_documents, attends_by_documents, mask_of

TOP = 5
"""The accuracy that is measured besides that of the first guess counts so many."""


class WrappedModel(TrainedModel):
    """Base of the networks of transformers. network: the plain one, which transformers saves and loads."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    @property
    def vocabulary_layers(self) -> Sequence[nn.Module]:
        """The network's embedding of tokens and its head."""
        return vocabulary_of_transformers(self.network)


class _TokenModel(WrappedModel):
    """Base of the networks that read tokens. Every token's embedding learns, that of the padding token too."""

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        embedding = network.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):
            embedding.padding_idx = None
        for module in network.modules():
            if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # reads tokens from the device; we never pad
                module.warn_if_padding_and_no_attention_mask = _keep_silent
        attend_by_documents(network)

    def forward(self, tokens_BT: Tensor, documents_BD: Tensor | None = None) -> Tensor:
        """Return the network's logits (B, T, V).

        documents_BD: as `documents.py` describes, for architectures that `KEEPS_DOCUMENTS_APART` lists.
        """
        options: dict[str, Any] = {}
        config = self.network.config
        first = 0
        if config.model_type in POSITIONS_AFTER_PADDING:
            first = config.pad_token_id + 1
            positions_T = torch.arange(first, first + tokens_BT.shape[1], device=tokens_BT.device)
            options["position_ids"] = positions_T.expand_as(tokens_BT)
        if documents_BD is not None:
            options["position_ids"] = positions_in_documents(documents_BD, tokens_BT.shape[1])
        if documents_BD is not None or attends_by_documents(self.network):
            options["attention_mask"] = mask_of(documents_BD, tokens_BT)
        longest = getattr(config, "max_position_embeddings", None)
        if isinstance(longest, int) and longest > 0:
            checked_length(tokens_BT, longest - first)
        if hasattr(config, "use_cache"):
            options["use_cache"] = False
        return self.network(input_ids=tokens_BT, **options).logits


def _keep_silent(*_arguments: Any) -> None:
    pass


class NextTokenModel(_TokenModel):
    """A causal language model."""

    def loss(self, batch: Mapping[str, Tensor]) -> Losses:
        """Mean cross entropy in nats per token, computed in fp32. Its backward pass can run only once."""
        logits_BTV = self(batch["tokens"], batch.get("documents"))
        return next_token_losses(logits_BTV, batch, with_metrics=not self.training, vocabulary=self.vocabulary)

    @property
    def tensor_plan(self) -> Mapping[str, TensorRole]:
        """The network's own `base_model_tp_plan`, with embedding and head by tokens."""
        return plan_of_transformers(self.network, "network.", with_vocabulary=True)


class MaskedTokenModel(_TokenModel):
    """A masked language model. Batches come from `octet.worker.data.targets`."""

    def loss(self, batch: Mapping[str, Tensor]) -> Losses:
        """Mean cross entropy in nats over the predicted tokens, computed in fp32. Its backward pass can run only once."""
        positions_BP = batch["positions"]
        logits_BTV = self(batch["tokens"])
        if isinstance(logits_BTV, DeferredLogits):
            return token_losses(logits_BTV.at(positions_BP), batch["targets"], None)
        logits_BPV = logits_BTV.gather(1, positions_BP[..., None].expand(-1, -1, logits_BTV.shape[-1]))
        return token_losses(logits_BPV, batch["targets"], "masked_token_accuracy" if not self.training else None)


def class_losses(logits_BK: Tensor, labels: Tensor, *, with_metrics: bool) -> Losses:
    """Return the mean cross entropy in nats and, if requested, `top1_accuracy` and `top5_accuracy`.

    labels: classes, int64 (B,); or, without metrics, each class's share of the target, fp32 (B, K).

    Top-5 accuracy is the share of images whose class is among the five (or all, if there are fewer) largest logits. The
    backward pass overwrites the logits, so it can run only once.
    """
    if labels.is_floating_point():
        return Losses(functional.cross_entropy(logits_BK.float(), labels), len(labels), {})
    metrics = {}
    if with_metrics:
        hits_Bk = logits_BK.topk(min(TOP, logits_BK.shape[1]), dim=-1).indices == labels[:, None]
        metrics = {"top1_accuracy": hits_Bk[:, 0].float().mean(), "top5_accuracy": hits_Bk.any(-1).float().mean()}
    return Losses(cross_entropy(logits_BK, labels), labels.numel(), metrics)


class ImageClassModel(WrappedModel):
    """An image classifier."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the network's logits (B, K)."""
        return self.network(pixel_values=images_BCHW).logits

    def loss(self, batch: Mapping[str, Tensor]) -> Losses:
        """Mean cross entropy in nats per image, computed in fp32. Its backward pass can run only once."""
        return class_losses(self(batch["images"]), batch["labels"], with_metrics=not self.training)


WRAPPERS: Mapping[Task, type[WrappedModel]] = {
    "next_token": NextTokenModel,
    "masked_token": MaskedTokenModel,
    "image_class": ImageClassModel,
}


def wrap(network: Any, task: Task) -> TrainedModel:
    """Wrap a network of transformers for its task."""
    return WRAPPERS[task](network)


def vocabulary_layers(model: nn.Module) -> Sequence[nn.Module]:
    """Return the layers of a model's vocabulary, embedding first: of our models and of transformers'; else none is known."""
    if isinstance(model, TrainedModel):
        return model.vocabulary_layers
    return vocabulary_of_transformers(model) if hasattr(model, "get_output_embeddings") else ()


def vocabulary_of_transformers(network: Any) -> list[nn.Module]:
    """Return a network's embedding of tokens and its head; for images transformers names layers of patches, which are left."""
    try:
        embedding = network.get_input_embeddings()
    except NotImplementedError:  # an architecture without one
        return []
    head = network.get_output_embeddings()
    return [layer for layer in (embedding, head) if isinstance(embedding, nn.Embedding) and layer is not None]


ROLES: Mapping[str, TensorRole] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "partial-gradients",
}


def plan_of_transformers(network: Any, prefix: str, *, with_vocabulary: bool) -> dict[str, TensorRole]:
    """Return the roles of a network's layers, empty where transformers has no plan that we know.

    prefix: begins the network's names in the model. with_vocabulary: embedding and head are divided by tokens.
    """
    base = f"{prefix}{network.base_model_prefix}."
    modules = {module: f"{prefix}{name}" for name, module in network.named_modules()}
    ends: dict[Any, TensorRole] = {network.get_input_embeddings(): "embedding", network.get_output_embeddings(): "head"}
    ends.pop(None, None)
    own_names = {modules[module]: role for module, role in ends.items()}
    named: Mapping[str, str] = getattr(network.config, "base_model_tp_plan", None) or {}
    styles = {f"{base}{glob}": style for glob, style in named.items()}
    # Where the head is tied, transformers adds the embedding to the plan, in a style of its own.
    styles = {glob: style for glob, style in styles.items() if not any(fnmatchcase(name, glob) for name in own_names)}
    if not styles or not set(styles.values()) <= set(ROLES):
        return {}
    plan = {glob: ROLES[style] for glob, style in styles.items()}
    return plan | own_names if with_vocabulary and len(own_names) == 2 else plan
