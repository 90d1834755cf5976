"""Predict the peaks of steps with each option that saves memory, and of an 8 B model's: rows of `predicted_memory.py`."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.networks import BF16_AMP, Step, Way, gpt_step, language_step
from benchmarks.gpu.report import Row, Target
from benchmarks.gpu.train import SIZES, SMALL
from octet.api_schemas.models import PRESETS
from octet.api_schemas.models.llama import LlamaSizes
from octet.worker.models.llama import Llama

GIB = 1 << 30
CARD_BYTES = 80 * 10**9
"""Memory of an 80 GB card; the CUDA context takes some hundreds of MB of it."""
RELEASE = {"gradient_release": True, "gradient_clip": None}
OPTIONS: dict[str, dict[str, Any]] = {
    "without options": {},
    "fused loss": {"fused_loss": True},
    "activations in FP8": {"saved_activations": "fp8"},
    "gradient release": RELEASE,
    "states in host memory": {"offload_optimizer": True},
    "the first three": {"fused_loss": True, "saved_activations": "fp8", **RELEASE},
    "residual stream in bf16": {"residual_stream": "bf16"},
    "the first three, residual stream in bf16": {
        "fused_loss": True,
        "saved_activations": "fp8",
        "residual_stream": "bf16",
        **RELEASE,
    },
}
VISION_SAVINGS: dict[str, Any] = {"saved_activations": "fp8", **RELEASE}
"""The options of the first three that suit a classifier: its loss has no logits of tokens."""
OFF_AND_ON = ("without options", "the first three")
WITH_RESIDUAL = ("residual stream in bf16", "the first three, residual stream in bf16")
TARGETS = {"O2": Target(0.56, 0.49, lower_is_better=True), "O2-8bit": Target(0.52, 0.42, lower_is_better=True)}
"""Peak of the 1.3 B step over bf16-amp's: without options, and the goal."""
KEPT_TARGET = Target(0.59, 0.40, lower_is_better=True)
"""Limits for the bytes that blocks keep for the backward pass, over bf16-amp's."""
LARGE_LEVELS = ("bf16-amp", "O2", "O2-8bit", "O3-split-8bit")

Predict = Callable[[Callable[[torch.device], tuple[Step, Any]]], Any]


def option_rows(predict: Predict, smoke: bool) -> Iterator[Row]:
    """Yield the peak of the first size's step for each option at each level, and what its blocks keep. Runs `predict`."""
    size = (SMALL if smoke else SIZES)[0]
    config = size.config
    per = size.batch_size * config.max_sequence_length * config.hidden_size * config.num_layers

    def step(way: Way, device: torch.device) -> tuple[Step, Any]:
        return gpt_step(config, way, size.batch_size, device, compiled=None)

    peer = predict(partial(step, BF16_AMP))
    weight_copies = 2 * 12 * config.hidden_size**2 * config.num_layers  # in bf16, from the forward to the backward pass
    peer_kept = (kept_bytes(peer.at_peak.by_origin) - weight_copies) / per
    note = f"blocks keep {peer_kept:.1f} bytes per token and hidden element, without copies of weights"
    yield Row(f"GPT {size.name}, bf16-amp", str(peer), note=note)
    residual = WITH_RESIDUAL[0]
    found = predict(partial(step, replace(BF16_AMP, savings=OPTIONS[residual])))
    kept = (kept_bytes(found.at_peak.by_origin) - weight_copies) / per
    note = f"blocks keep {kept:.1f} bytes per token and hidden element, without copies of weights"
    ratio = found.peak_bytes / peer.peak_bytes
    yield Row(f"GPT {size.name}, bf16-amp, {residual}", str(found), f"bf16-amp {peer}", ratio, note=note)
    for level, names in {"O2": tuple(OPTIONS), "O2-8bit": (*OFF_AND_ON, *WITH_RESIDUAL)}.items():
        for name in names:
            found = predict(partial(step, Way(level, level, savings=OPTIONS[name])))
            figure, all_on = f"GPT {size.name}, {level}, {name}", name == "the first three"
            ratio = found.peak_bytes / peer.peak_bytes
            yield Row(figure, str(found), f"bf16-amp {peer}", ratio, TARGETS[level] if all_on else None, found.note)
            kept = kept_bytes(found.at_peak.by_origin) / per
            if kept:
                figure = f"{figure}: blocks keep, per token and hidden element"
                target = KEPT_TARGET if all_on else None
                yield Row(figure, f"{kept:.1f} bytes", f"bf16-amp {peer_kept:.1f}", kept / peer_kept, target)


def large_rows(predict: Predict, smoke: bool) -> Iterator[Row]:
    """Yield the peak of a Llama of 8 B parameters' step, one sequence of 2,048 tokens, against 80 GB. Runs `predict`."""
    sizes, num_tokens = PRESETS["llama-tiny" if smoke else "llama-8b"], 32 if smoke else 2048
    assert isinstance(sizes, LlamaSizes)

    def step(way: Way, device: torch.device) -> tuple[Step, Any]:
        return language_step(build_llama(sizes, device), way, (1, num_tokens), sizes.vocab_size, device)

    for level in LARGE_LEVELS:
        for name in OFF_AND_ON[:1] if level == BF16_AMP.level else (*OFF_AND_ON, *WITH_RESIDUAL):
            found = predict(partial(step, Way(level, level, own_optimizer=level != BF16_AMP.level, savings=OPTIONS[name])))
            fits = "fits" if found.peak_bytes <= CARD_BYTES else "does not fit"
            figure = f"Llama {'tiny' if smoke else '8 B'}, 1 × {num_tokens} tokens, {level}, {name}"
            card = f"80 GB ({CARD_BYTES / GIB:.2f} GiB)"
            yield Row(figure, str(found), card, found.peak_bytes / CARD_BYTES, None, f"{fits}. {found.note}")


def build_llama(sizes: LlamaSizes, device: torch.device) -> Llama:
    """Build a Llama with uninitialized values on a device."""
    with torch.device("meta"):
        model = Llama(sizes)
    model.to_empty(device=device)
    return model


def kept_bytes(by_origin: Counter[str]) -> int:
    """Return the bytes that blocks of the model made in the forward pass. 0 if the peak is in another moment."""
    return sum(held for origin, held in by_origin.items() if origin.startswith("forward: blocks."))
