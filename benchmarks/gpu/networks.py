"""The benchmarked networks, built on the device itself, and their training step at a level of ours or of others."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from octet.api_schemas import GPTSizes, TrainingSpec
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.recipe import RecipeSpec
from octet.worker import initialize, memory_report
from octet.worker.metrics.table import Metrics
from octet.worker.models import TrainedModel
from octet.worker.models.gpt import GPT
from octet.worker.prepare.blocks import compile_blocks
from octet.worker.prepare.memory_options import prepare_steps
from octet.worker.train.step_graph import CudaRecorder, StepGraph

VOCABULARY = 50304
SEQUENCE_LENGTH = 2048
SWIN_PARAMETERS, VIT_PARAMETERS = 1_064_127_084, 1_212_632_040

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Way:
    """A way to train: a level and its options. own_optimizer: Octet's optimizer; False means torch's fused fp32 AdamW.

    savings: options of a job's training that save memory. Without gradient release, gradients are clipped.
    graphed: on CUDA, steps are recorded as CUDA graphs and replayed, as in a job (`worker/train/step_graph.py`).
    """

    name: str
    level: str
    own_optimizer: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    savings: dict[str, Any] = field(default_factory=dict)
    graphed: bool = False

    @property
    def package(self) -> str | None:
        """The package that this way needs in addition to torch."""
        return "torchao" if self.level == "ao" else None


ROWWISE = RecipeSpec(granularity="row", format="E4M3")
BF16_AMP = Way("bf16-amp", "bf16-amp", own_optimizer=False)
AO_TENSORWISE = Way("torchao tensorwise", "ao", own_optimizer=False)
AO_ROWWISE = Way("torchao rowwise", "ao", own_optimizer=False, options={"recipe": ROWWISE})
FP16_AMP, TE, O1, O2, O3_SPLIT = (Way(name, name) for name in ("fp16-amp", "te", "O1", "O2", "O3-split"))
GRAPHED = tuple(replace(way, name=f"{way.name}, CUDA graphs", graphed=True) for way in (BF16_AMP, O2))
O2_ALL_FP8 = Way("O2 all in FP8", "O2", options={"auto_filter": False})
"""O2 without the filter by speed, to save memory: a layer in bf16 keeps its input in bf16 for the backward pass."""


def in_fp8(level: str) -> dict[str, Any]:
    """Return options with which every layer of a level multiplies in FP8, for measurements of FP8 itself."""
    return {"auto_filter": False} if LEVELS[level].has_own_fp8 else {}


def build_gpt(config: GPTSizes, device: torch.device) -> GPT:
    """Build a GPT whose initial values are drawn on the device. Drawn by the host, they take a minute at 6.7 B."""
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.head.weight = model.token_embedding.weight
    residual_std = 0.02 / math.sqrt(2 * config.num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0.0, residual_std if name.endswith(("output.weight", "down.weight")) else 0.02)
    return model


def prepare(model: nn.Module, way: Way, tokens: int | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Convert the model and return it with an optimizer. FP8 statistics are off unless the way's options ask for them.

    tokens: tokens per forward pass; they decide which shapes gain nothing in FP8.
    """
    options = {"statistics_every": 0, **way.options}
    if way.own_optimizer:
        adamw = torch.optim.AdamW(model.parameters())
        model, optimizer = initialize(model, adamw, way.level, tokens=tokens, **options)
        assert optimizer is not None
        return model, optimizer
    model, _ = initialize(model, None, way.level, tokens=tokens, **options)
    is_cuda = next(model.parameters()).is_cuda
    return model, torch.optim.AdamW(model.parameters(), fused=is_cuda, capturable=is_cuda and way.graphed)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor], *, clips: bool = True) -> Step:
    """Return one training step: forward, backward, clip, update."""

    def step() -> Tensor:
        loss = loss_of()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def graphed_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, samples: Callable[[], dict[str, Tensor]], device: torch.device
) -> Step:
    """Return the step of `step_of` as a job runs it: recorded after three steps, then replayed. On a CPU it runs as it is."""
    graph = StepGraph(model, optimizer, recorder=CudaRecorder(device) if device.type == "cuda" else None)
    metrics = Metrics()

    def step() -> Tensor:
        with graph.stream():
            graph.begin_step()
            loss = graph.forward_backward(samples(), 1.0, metrics, is_first=True)
            graph.update(lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm), 1.0)
            optimizer.zero_grad()
            graph.after_step()
        return loss

    return step


def gpt_step(config: GPTSizes, way: Way, batch_size: int, device: torch.device, *, compiled: str | None) -> tuple[Step, Any]:
    """Return the step of a GPT on random tokens, and (model, optimizer). compiled: backend for its blocks, None for eager.

    Blocks are compiled one by one, since all have the same graph. This takes seconds; a whole network takes minutes.
    """
    tokens = batch_size, config.max_sequence_length
    return language_step(build_gpt(config, device), way, tokens, config.vocab_size, device, compiled=compiled)


def language_step(
    model: nn.Module, way: Way, tokens: tuple[int, int], vocab_size: int, device: torch.device, *, compiled: str | None = None
) -> tuple[Step, Any]:
    """Return the step of a model that predicts the next token, on random tokens, and (model, optimizer); see `gpt_step`.

    tokens: sequences of a batch, and tokens of each.
    """
    model, optimizer = prepare(model, way, math.prod(tokens))
    save_memory(model, optimizer, way, device)
    if compiled is not None:
        compile_blocks(model, compiled)
    batches = cycle(torch.randint(0, vocab_size, (4, tokens[0], tokens[1] + 1), device=device).unbind())

    def samples() -> dict[str, Tensor]:
        tokens_BT = next(batches)
        return {"tokens": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:]}

    def loss_of() -> Tensor:
        assert isinstance(model, TrainedModel)
        return model.loss(samples()).loss

    if way.graphed:
        return graphed_step(model, optimizer, samples, device), (model, optimizer)
    clips = not way.savings.get("gradient_release")
    return step_of(model, optimizer, loss_of, clips=clips), (model, optimizer)


def save_memory(model: nn.Module, optimizer: torch.optim.Optimizer, way: Way, device: torch.device) -> None:
    """Do with a converted model and its optimizer what the options of a way say."""
    if way.savings:
        prepare_steps(model, optimizer, TrainingSpec.model_validate({"steps": 1, "compile": "off", **way.savings}), device)


def vision_step(family: str, way: Way, device: torch.device, *, smoke: bool) -> tuple[Step, Any]:
    """Return the step of Swin-1.0B or ViT-1.2B on random images, and (model, optimizer)."""
    with device:
        model = vision_model(family, smoke=smoke)
    batch_size, num_pixels, num_classes = (2, 32, 10) if smoke else (16 if family == "Swin" else 64, 224, 1000)
    images = torch.randn(batch_size, 3, num_pixels, num_pixels, device=device)
    labels = torch.randint(0, num_classes, (batch_size,), device=device)
    tokens_per_image = {"Swin": 14 * 14, "ViT": 14 * 14 + 1}[family]  # Swin: tokens of the stage with 18 of its 24 blocks
    converted, optimizer = prepare(model, way, batch_size * tokens_per_image)
    save_memory(converted, optimizer, way, device)
    clips = not way.savings.get("gradient_release")
    step = step_of(converted, optimizer, lambda: converted(pixel_values=images, labels=labels).loss, clips=clips)
    return step, (converted, optimizer)


def vision_model(family: str, *, smoke: bool) -> nn.Module:
    """Build a network from transformers' classes, on the default device, with random weights. Checks its parameters."""
    transformers = importlib.import_module("transformers")
    if family == "Swin":
        sizes: dict[str, Any] = {"embed_dim": 448, "depths": [2, 2, 18, 2], "num_heads": [14, 28, 56, 112], "window_size": 7}
        small: dict[str, Any] = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
        num_parameters = SWIN_PARAMETERS
    else:
        sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "intermediate_size": 8192}
        sizes |= {"patch_size": 16}
        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 8}
        num_parameters = VIT_PARAMETERS
    image_size, num_labels = (32, 10) if smoke else (224, 1000)
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(image_size=image_size, num_labels=num_labels, **(small if smoke else sizes))
    model = getattr(transformers, f"{family}ForImageClassification")(config)
    held = sum(parameter.numel() for parameter in model.parameters())
    if not smoke and held != num_parameters:
        change = "Install another version of transformers."
        raise ValueError(f"{family} has {held:,} parameters; expected {num_parameters:,}. {change}")
    return model


def peak_bytes_of(step: Step, held: Any, device: torch.device) -> int:
    """Return the peak memory of two steps, after one that allocates the states. On a CPU: bytes of model and optimizer."""
    step()
    if device.type != "cuda":
        step()
        return sum(memory_report(*held).values())
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        loss = step()
    torch.cuda.synchronize(device)
    if not math.isfinite(loss.item()):
        raise ValueError(f"the loss is {loss.item()} after three steps; this measurement is not of a training run.")
    return torch.cuda.max_memory_allocated(device)
