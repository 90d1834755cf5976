"""Jobs of random options train on an accelerator with compiled blocks, as jobs on CUDA do, as with eager ones.

The tests of each option combine it with few others. Here a seed draws the options of a tiny example together.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from octet.api_schemas import EventReport, JobSpec
from octet.api_schemas.levels import LEVELS
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.prepare.blocks import compile_blocks
from tests.kit.examples import TINY, document_in, in_folder
from tests.kit.training import train

NUM_JOBS, NUM_FAST = 60, 2
TOLERANCE = 2e-2
"""Relative, of losses. Norms of eager blocks are one kernel there: a last bit may round to another code."""
RECIPES: tuple[dict[str, Any], ...] = (
    *({"granularity": granularity} for granularity in ("row", "block", "mx")),
    *({"high_precision_gemms": [product]} for product in ("output", "grad_input", "grad_weight")),
    {"scaling": "delayed", "amax_history_length": 3},
    {"margin": 1},
)
TRAINING: dict[str, tuple[Any, ...]] = {
    "micro_batch_size": (None, 1, 2),
    "checkpoint_every": (0, 2),
    "activation_checkpointing": ("none", "selective", "full"),
    "saved_activations": ("exact", "fp8"),
    "residual_stream": ("fp32", "bf16"),
    "fused_loss": (False, True),
    "gradient_release": (False, False, True),
    "offload_optimizer": (False, True),
    "ema_decay": (None, 0.9),
    "gradient_clip": (None, 1.0),
}


def drawn(seed: int, folder: Path) -> dict[str, Any]:
    """Return the first job of one process that the rules allow, of those that a seed draws."""
    draw = random.Random(seed)
    while True:
        document = document_in(draw.choice(TINY))
        level = draw.choice(list(LEVELS))
        document["precision"] = {"level": level}
        if LEVELS[level].has_own_fp8:
            document["precision"] |= {"statistics_every": 2, "recipe": draw.choice(({}, *RECIPES))}
        options = {name: draw.choice(values) for name, values in TRAINING.items() if draw.random() < 0.6}
        steps = {"steps": 5, "eval_every": 3, "eval_batches": 1, "global_batch_size": 4, "compile": "on"}
        document["training"] = document["training"] | options | steps
        if document["data"]["source"] == "jsonl":
            document["data"]["packing"] = draw.random() < 0.5
        document = in_folder(document, folder)
        try:
            if JobSpec.model_validate(document).resources.workers == 1:
                return document
        except ValidationError:
            pass


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # a norm that Dynamo traces
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < NUM_FAST else pytest.mark.matrix) for seed in range(NUM_JOBS)]
)
def test_compiled_blocks_train_a_random_job_as_eager_ones_do(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octet.worker.prepare.blocks.compile_blocks", lambda model: compile_blocks(model, backend="aot_eager"))
    torch.set_num_threads(1)
    document, found = drawn(seed, tmp_path), []
    for compiling in ("on", "off"):
        torch.compiler.reset()
        document["training"]["compile"] = compiling
        with cpu_as_accelerator():
            recorder, summary = train(document, tmp_path / compiling)
        found.append([*recorder.losses(), summary.evaluation_loss])
        events = [event.message for event in recorder.of(EventReport) if event.type.startswith("training.graph_")]
        assert not events, document
    compiled, eager = found
    assert compiled == pytest.approx(eager, rel=TOLERANCE), document
