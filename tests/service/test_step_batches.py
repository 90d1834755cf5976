"""What the fast reader accepts, the contract accepts too and means the same; everything else is left to the contract."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from api_schemas import ReportBatch
from service.jobs.step_batches import read_step_batch

STEP = {"kind": "step", "step": 3, "loss": 1.5, "gradient_norm": None, "learning_rate": 1, "tokens": 0, "step_time_s": 0.1}
STEP |= {"data_wait_s": 0.0}
REPORT = {"seq": 7, "at": "2026-11-22T14:00:00.123456Z", "body": STEP}

READ = {
    "a heartbeat": {"epoch": 1, "rank": 3},
    "no reports": {"epoch": 1, "rank": 0, "reports": []},
    "a step": {"epoch": 2, "rank": 0, "reports": [REPORT]},
    "an offset of zero": {"epoch": 2, "rank": 0, "reports": [REPORT | {"at": "2026-11-22T14:00:00+00:00"}]},
    "the largest step": {"epoch": 1, "rank": 0, "reports": [REPORT | {"body": STEP | {"step": 2**53}}]},
}
LEFT: dict[str, Any] = {
    "another zone": {"epoch": 1, "rank": 0, "reports": [REPORT | {"at": "2026-11-22T14:00:00+01:00"}]},
    "no zone": {"epoch": 1, "rank": 0, "reports": [REPORT | {"at": "2026-11-22T14:00:00"}]},
    "a log line": {"epoch": 1, "rank": 0, "reports": [REPORT | {"body": {"kind": "log", "level": "INFO", "message": "a"}}]},
    "a number as text": {"epoch": "1", "rank": 0},
    "an unknown field": {"epoch": 1, "rank": 0, "more": 1},
    "an unknown field of a step": {"epoch": 1, "rank": 0, "reports": [REPORT | {"body": STEP | {"more": 1}}]},
    "epoch 0": {"epoch": 0, "rank": 0},
    "a negative rank": {"epoch": 1, "rank": -1},
    "step 0": {"epoch": 1, "rank": 0, "reports": [REPORT | {"body": STEP | {"step": 0}}]},
    "no loss": {"epoch": 1, "rank": 0, "reports": [REPORT | {"body": {k: v for k, v in STEP.items() if k != "loss"}}]},
    "a loss that is not finite": {"epoch": 1, "rank": 0, "reports": [REPORT | {"body": STEP | {"loss": float("nan")}}]},
    "too many": {"epoch": 1, "rank": 0, "reports": [REPORT] * 1001},
    "not an object": [],
}


@pytest.mark.parametrize("name", READ)
def test_reads_as_the_contract(name: str) -> None:
    body = json.dumps(READ[name]).encode()
    batch = read_step_batch(body)
    assert batch is not None
    assert batch.as_contract() == ReportBatch.model_validate_json(body)
    assert all(report.at.tzinfo is UTC for report in batch.reports)


@pytest.mark.parametrize("name", LEFT)
def test_leaves_the_rest_to_the_contract(name: str) -> None:
    assert read_step_batch(json.dumps(LEFT[name]).encode()) is None


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"epoch": 1, "rank": "\xff"}', b'{"epoch": 1e400, "rank": 0}'])
def test_leaves_what_is_not_json_to_the_contract(body: bytes) -> None:
    assert read_step_batch(body) is None


def test_accepts_no_number_that_the_contract_refuses() -> None:
    for number in ("-0", "1e2", "1.0", "1E400", "-1e400", "9007199254740993", "1e-400", "01", "+1", ".5", "1.", "true", "null"):
        for field in STEP:
            step = json.dumps(STEP).replace(f'"{field}": {json.dumps(STEP[field])}', f'"{field}": {number}')
            body = (
                f'{{"epoch": 1, "rank": 0, "reports": [{{"seq": 1, "at": "2026-11-22T14:00:00Z", "body": {step}}}]}}'.encode()
            )
            batch = read_step_batch(body)
            if batch is None:
                continue
            try:
                wanted = ReportBatch.model_validate_json(body)
            except ValidationError as error:
                pytest.fail(f"{field} {number} was read: {error}")
            assert batch.as_contract() == wanted
            assert batch.reports[0].at == datetime(2026, 11, 22, 14, tzinfo=UTC)
