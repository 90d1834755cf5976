"""A real comparison of small jobs: a planted bad recipe is found, a twin is called equal, and kills change nothing of that."""

from typing import Any

import pytest

from octet.api_schemas.comparison import ComparisonState
from octet.api_schemas.comparison_report import ComparisonDetails
from tests.e2e.octet_server import Server

BASELINE, TWIN, BAD = 0, 1, 16
"""Powers of two of headroom in FP8: one more costs nothing, and with sixteen gradients and activations vanish."""


def ended(server: Server, comparison_id: str) -> ComparisonDetails:
    server.wait_for(lambda: server.client.comparison(comparison_id).state.is_terminal)
    return server.client.comparison(comparison_id)


def num_outcomes(server: Server, comparison_id: str) -> int:
    return sum(child.outcome is not None for child in server.client.comparison(comparison_id).children)


@pytest.mark.system
def test_a_real_comparison_is_right_and_the_same_after_kills(mortal_server: Server, long_job: dict[str, Any]) -> None:
    server = mortal_server
    lengths = {"steps": 100, "eval_every": 25, "checkpoint_every": 25}
    training = long_job["training"] | lengths | {"optimizer": {"name": "adamw", "learning_rate": 3e-3}}
    asked = {
        "job": long_job | {"training": training, "precision": {"level": "te"}},
        "vary": {"precision.recipe.margin": [BASELINE, TWIN, BAD]},
        "seeds": 4,
        "tolerance": 0.04,
    }
    undisturbed = ended(server, server.client.compare(asked).id)
    assert (undisturbed.state, undisturbed.message) == (ComparisonState.FINISHED, "all are certain")
    assert [arm.answer for arm in undisturbed.report.arms] == ["baseline", "yes", "no"], undisturbed.report
    assert {gap.measure for gap in undisturbed.report.arms[1].gaps} == {"training_loss", "loss", "token_accuracy"}
    assert undisturbed.report.noise is not None
    assert undisturbed.report.noise > 0, "the changed start was another one"

    comparison_id = server.client.compare(asked).id
    server.wait_for(lambda: num_outcomes(server, comparison_id) >= 2)
    server.kill()
    server.start()
    server.wait_for(lambda: num_outcomes(server, comparison_id) >= 5)
    server.kill()
    server.kill_the_cluster()
    server.start()
    disturbed = ended(server, comparison_id)
    assert disturbed.message == undisturbed.message
    assert disturbed.report.noise == undisturbed.report.noise
    for one, other in zip(disturbed.report.arms, undisturbed.report.arms, strict=True):
        assert (one.words, one.by_seed, one.gaps) == (other.words, other.by_seed, other.gaps)
