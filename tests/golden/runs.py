"""List the small jobs whose numbers are recorded in roads.json, and the roads that each of them takes.

A run differs from `record.document` by two layers, an evaluation after ten steps, and the fields that it states here. Levels
take every road on one rank and on two. Recipes, families and memory options are where norms, gates, activations and layers
hand amaxes and codes to each other, so these take the roads of an accelerator.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from octet.api_schemas.levels import LEVELS
from tests.golden import record

Fields = dict[str, Any]

ROADS = ("cpu", "accelerator", "compiled")
"""On a CPU; on a CPU that stands for an accelerator; the same with blocks that are compiled with the backend aot_eager."""

LLAMA: Fields = {"family": "llama", "intermediate_size": 128, "num_key_value_heads": 1}
GPT2: Fields = {
    "family": "huggingface",
    "architecture": "gpt2",
    "config": {"vocab_size": 256, "n_positions": 64, "n_layer": 2, "n_embd": 64, "n_head": 2},
}
ONE_PASS: Fields = {"gradient_release": True, "gradient_clip": None, "micro_batch_size": 8}
WINDOW: Fields = {"scaling": "delayed", "amax_history_length": 4}
DEMOTING: Fields = {"min_sqnr_db": 25.4, "patience": 1}
"""Gradients in E5M2 have about 25.5 dB: some layers break this limit at a sample, and others do not."""


def level(name: str, **precision: Any) -> Fields:
    return {"precision": {"level": name, **precision}}


def recipe(name: str, **recipe: Any) -> Fields:
    return level(name, recipe=recipe)


def training(name: str, **training: Any) -> Fields:
    return level(name) | {"training": training}


def llama(name: str, **precision: Any) -> Fields:
    return level(name, **precision) | {"model": LLAMA}


LEVEL_RUNS: dict[str, Fields] = {name: level(name) for name in LEVELS}

RECIPE_RUNS: dict[str, Fields] = {
    **{name: {"precision": precision} for name, precision in record.RUNS.items() if name not in LEVELS},
    "te, most recent amax, every third step": recipe(
        "te", **WINDOW | {"amax_compute_algorithm": "most_recent", "interval": 3, "margin": 1}
    ),
    "O2, window of 4": recipe("O2", **WINDOW),
    "O2, mx": recipe("O2", granularity="mx"),
    "O2, output in bf16": recipe("O2", high_precision_gemms=["output"]),
    "O2, grad_input in bf16": recipe("O2", high_precision_gemms=["grad_input"]),
    "O2, evaluation in bf16": recipe("O2", fp8_in_evaluation=False),
    "O2, demoted layers": level("O2", demotion=DEMOTING),
    "O2, attention excluded": level("O2", exclude=["*attention*"]),
}

FAMILY_RUNS: dict[str, Fields] = {
    **{f"{name}, llama": llama(name) for name in ("bf16-amp", "te", "O1", "O2", "O3-split")},
    "te, window of 4, llama": llama("te", recipe=WINDOW),
    "O2, row, llama": llama("O2", recipe={"granularity": "row"}),
    "O2, demoted layers, llama": llama("O2", demotion=DEMOTING),
    "O2, gpt2": level("O2") | {"model": GPT2},
}

OPTION_RUNS: dict[str, Fields] = {
    "O2, selective checkpointing": training("O2", activation_checkpointing="selective"),
    "te, full checkpointing": training("te", activation_checkpointing="full"),
    "O2, activations in fp8": training("O2", saved_activations="fp8"),
    "O2, stream in bf16": training("O2", residual_stream="bf16"),
    "O2, stream in bf16, llama": training("O2", residual_stream="bf16") | {"model": LLAMA},
    "O2, fused loss": training("O2", fused_loss=True),
    "O2, gradient release": training("O2", **ONE_PASS),
    "O3-split, offloaded": training("O3-split", offload_optimizer=True),
    "O2, moving average": training("O2", ema_decay=0.9),
    "O2, lion": training("O2", optimizer={"name": "lion", "learning_rate": 1e-3}),
    "O2, sgd": training("O2", optimizer={"name": "sgd", "learning_rate": 1e-1}),
}

PARALLEL_RUNS: dict[str, Fields] = {
    f"{name}, {words}": level(name) | {"parallelism": parallelism}
    for name, words, parallelism in (
        ("O2", "zero 1", {"zero_stage": 1}),
        ("O2", "zero 2", {"zero_stage": 2}),
        ("O2", "zero 3", {"zero_stage": 3}),
        ("O3-split", "zero 3", {"zero_stage": 3}),
        ("O2", "tensor", {"tensor": 2}),
        ("te", "tensor, sequence", {"tensor": 2, "sequence": True}),
        ("O2", "tensor, sequence", {"tensor": 2, "sequence": True}),
        ("O2", "context", {"context": 2}),
        ("O2", "pipeline", {"pipeline": 2}),
    )
}

RUNS = LEVEL_RUNS | RECIPE_RUNS | FAMILY_RUNS | OPTION_RUNS | PARALLEL_RUNS


COMPILED_ON_TWO_RANKS = ("bf16-amp", "te", "O2", "O3-split")
ALSO_ON_CPU = ("O2, window of 4", "O2, mx", "O2, demoted layers", "te, llama", "O2, llama", "O3-split, llama")
"""golden.json has the other recipes on a CPU."""
ALSO_COMPILED = (
    *("te, window of 4", "O2, row", "O2, block", "O3-split, grad_weight in bf16", "O2, demoted layers"),
    *("te, llama", "O2, llama", "O3-split, llama"),
    *("O2, selective checkpointing", "O2, activations in fp8", "O2, stream in bf16, llama"),
)
"""A compiled run takes three times as long as another."""


class Run(NamedTuple):
    """One recorded run."""

    name: str
    road: str
    num_ranks: int

    def __str__(self) -> str:
        """The key in roads.json, and the test's name."""
        return f"{self.name}; {self.road}; {self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"


def all_runs() -> Iterator[Run]:
    """Yield every recorded run."""
    for name in LEVEL_RUNS:
        yield from (Run(name, road, 1) for road in ROADS)
        yield from (Run(name, road, 2) for road in ROADS if road != "compiled" or name in COMPILED_ON_TWO_RANKS)
    for name in (*RECIPE_RUNS, *FAMILY_RUNS, *OPTION_RUNS):
        yield Run(name, "accelerator", 1)
        if name in ALSO_ON_CPU:
            yield Run(name, "cpu", 1)
        if name in ALSO_COMPILED:
            yield Run(name, "compiled", 1)
    for name in PARALLEL_RUNS:
        yield Run(name, "accelerator", 2)


def document(run: Run, corpus: Path) -> Fields:
    """Return a run's job spec."""
    fields = RUNS[run.name]
    job = record.document(fields["precision"], corpus, run.num_ranks)
    has_own_sizes = "config" in fields.get("model", {})
    job["model"] = fields["model"] if has_own_sizes else job["model"] | {"num_layers": 2} | fields.get("model", {})
    job["training"] |= {"eval_every": 10} | fields.get("training", {})
    job["parallelism"] = fields.get("parallelism", {})
    if run.road == "compiled":
        job["training"]["compile"] = "on"
        if run.num_ranks > 1:  # one pass; `test_compiled.py` has ranks that accumulate
            job["training"]["micro_batch_size"] = 4
    return job
