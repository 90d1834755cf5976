"""Ten real comparisons of each planted bad recipe: all find it, and at most one calls a twin different."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octet.api_schemas.comparison_report import ComparisonDetails
from tests.e2e.conftest import served
from tests.e2e.octet_server import Server

NUM_COMPARISONS, NUM_SEEDS = 10, 10
CURRENT_AMAX = {"scaling": "delayed", "amax_history_length": 1}
NEVER = 100_000

SETTINGS: dict[str, dict[str, Any]] = {
    "margin 6": {
        "precision": {"level": "te", "recipe": CURRENT_AMAX},
        "steps": 60,
        "arguments": {"depth": 3, "token": 8192.0},
        "vary": {"precision.recipe.margin": [0, 6]},
        "tolerance": 0.05,
    },
    "a stuck scale": {
        "precision": {"level": "te", "recipe": CURRENT_AMAX},
        "steps": 400,
        "arguments": {"depth": 4, "channel": 1024.0},
        "vary": {"precision.recipe.interval": [1, NEVER]},
        "tolerance": 0.2,
    },
    "no loss scaling at fp16": {
        "precision": {"level": "fp16-amp"},
        "steps": 200,
        "arguments": {"loss_weight": 1e-4},
        "vary": {"model.arguments.planted": ["nothing", "twin", "no_loss_scaling"]},
        "tolerance": 0.05,
    },
    "E5M2 everywhere": {
        "entrypoint": "build_student",
        "precision": {"level": "te", "recipe": CURRENT_AMAX},
        "steps": 200,
        "learning_rate": 1e-2,
        "arguments": {},
        "vary": {"model.arguments.planted": ["nothing", "twin", "e5m2"]},
        "tolerance": 0.2,
    },
}
"""Bad recipes, with the fields that their arms vary."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose ranks may import this package."""
    folder, root = tmp_path_factory.mktemp("planted"), Path(__file__).parents[2]
    pools = folder / "pools.yaml"
    pools.write_text("- {name: cpu, node_label: [octet-pool, cpu], slots: 2, accelerator: cpu, allows_entrypoints: true}\n")
    yield from served(Server(folder / "octet", variables={"OCTET_POOLS_FILE": str(pools), "PYTHONPATH": str(root)}))


def compared(server: Server, spec_document: dict[str, Any], name: str, number: int) -> ComparisonDetails:
    """Run a comparison to its end. number: which of those whose seeds all differ."""
    setting = SETTINGS[name]
    entrypoint = f"tests.e2e.planted_recipes:{setting.get('entrypoint', 'build')}"
    model = {"entrypoint": entrypoint, "arguments": setting["arguments"], "vocab_size": 256}
    training = {
        "steps": setting["steps"],
        "global_batch_size": 8,
        "sequence_length": 64,
        "eval_batches": 4,
        "optimizer": {"name": "adamw", "learning_rate": setting.get("learning_rate", 3e-3)},
        "seed": 100 * number,
    }
    job = spec_document | {"name": "planted", "model": model, "precision": setting["precision"], "training": training}
    asked = {"job": job, "vary": setting["vary"], "seeds": NUM_SEEDS, "tolerance": setting["tolerance"]}
    comparison_id = server.client.compare(asked).id
    server.wait_for(lambda: server.client.comparison(comparison_id).state.is_terminal)
    return server.client.comparison(comparison_id)


@pytest.mark.matrix
@pytest.mark.parametrize("name", SETTINGS)
def test_a_bad_recipe_is_found_and_a_twin_is_called_equal(server: Server, spec_document: dict[str, Any], name: str) -> None:
    num_twins_called_different = 0
    for number in range(NUM_COMPARISONS):
        report = compared(server, spec_document, name, number).report
        assert report.not_calm is None, report.not_calm
        _, *twins, bad = report.arms
        assert bad.answer == "no", report
        num_twins_called_different += sum(twin.answer == "no" or twin.is_distinct for twin in twins)
    assert num_twins_called_different <= 1
