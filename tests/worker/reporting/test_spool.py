"""The queue of reports keeps its order in memory and on disk, for any sequence of operations."""

from datetime import UTC, datetime
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from octet.api_schemas import LogReport, Report
from octet.worker.reporting.spool import Spool


def report(seq: int) -> Report:
    return Report(seq=seq, at=datetime.now(UTC), body=LogReport(level="INFO", message=f"line {seq}"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["append", "drop"]), st.integers(1, 7)), max_size=60))
def test_it_is_a_queue(tmp_path_factory: object, operations: list[tuple[str, int]]) -> None:
    spool = Spool(Path(tmp_path_factory.mktemp("spool"), "x.jsonl"), max_in_memory=3)  # type: ignore[attr-defined]
    expected: list[int] = []
    last = 0
    for operation, count in operations:
        if operation == "append":
            for _ in range(count):
                last += 1
                spool.append(report(last))
                expected.append(last)
        elif expected:
            head = spool.peek(count)
            assert [item.seq for item in head] == expected[: len(head)]
            assert head
            spool.drop(head[-1].seq)
            expected = expected[len(head) :]
        assert len(spool) == len(expected)
    while expected:
        head = spool.peek(10)
        assert [item.seq for item in head] == expected[: len(head)]
        spool.drop(head[-1].seq)
        expected = expected[len(head) :]
    assert spool.peek(1) == []
    spool.close()


def test_the_file_is_gone_after_closing(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "x.jsonl", max_in_memory=1)
    for seq in range(1, 5):
        spool.append(report(seq))
    assert (tmp_path / "x.jsonl").exists()
    spool.close()
    assert not (tmp_path / "x.jsonl").exists()
