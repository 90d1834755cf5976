"""A real comparison of small jobs: a planted bad recipe is found, a twin is called equal, and kills change nothing of that."""

from typing import Any

import pytest

from octet.api_schemas.comparison import ComparisonState
from octet.api_schemas.comparison_report import ComparisonDetails
from tests.e2e.octet_server import Server

BASELINE, TWIN, BAD = 1e-3, 0.00100001, 1e-6


def ended(server: Server, comparison_id: str) -> ComparisonDetails:
    server.wait_for(lambda: server.client.comparison(comparison_id).state.is_terminal)
    return server.client.comparison(comparison_id)


def num_outcomes(server: Server, comparison_id: str) -> int:
    return sum(child.outcome is not None for child in server.client.comparison(comparison_id).children)


@pytest.mark.system
def test_a_real_comparison_is_right_and_the_same_after_kills(mortal_server: Server, long_job: dict[str, Any]) -> None:
    server = mortal_server
    training = long_job["training"] | {"steps": 60, "eval_every": 20, "checkpoint_every": 20}
    asked = {
        "job": long_job | {"training": training},
        "vary": {"training.optimizer.learning_rate": [BASELINE, TWIN, BAD]},
        "seeds": 3,
        "tolerance": 0.02,
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
