"""Ranks and batches are divided without loss or overlap, for all degrees of parallelism."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.api_schemas import AxisName, BatchDivision, JobSpec, Layout

AXES: tuple[AxisName, ...] = (
    "world",
    "pipeline",
    "data",
    "context",
    "replicas",
    "tensor",
    "stage",
    "expert",
    "expert_replicas",
)
degrees = st.integers(1, 3)


@given(degrees, degrees, degrees, st.integers(1, 2), st.integers(1, 3))
def test_every_rank_is_in_one_group_of_each_axis(pipeline: int, data: int, tensor: int, context: int, expert: int) -> None:
    num_ranks, replicas = pipeline * data * tensor * context * expert, data * context * expert
    layout = Layout(num_ranks, tensor=tensor, pipeline=pipeline, context=context, expert=expert)
    data *= expert
    sizes = {"world": layout.num_ranks, "pipeline": pipeline, "data": data, "context": context, "replicas": replicas}
    sizes |= {"tensor": tensor, "stage": replicas * tensor, "expert": expert, "expert_replicas": replicas // expert}
    for axis in AXES:
        groups = layout.groups(axis)
        assert Counter(rank for group in groups for rank in group) == Counter(range(layout.num_ranks))
        assert {len(group) for group in groups} == {sizes[axis]}
        assert all(layout.group(axis, rank) == group for group in groups for rank in group)


@given(degrees, degrees, degrees, st.integers(1, 2), st.integers(1, 3))
def test_two_axes_meet_in_one_rank(pipeline: int, data: int, tensor: int, context: int, expert: int) -> None:
    num_ranks = pipeline * data * tensor * context * expert
    layout = Layout(num_ranks, tensor=tensor, pipeline=pipeline, context=context, expert=expert)
    for rank in range(layout.num_ranks):
        assert set(layout.group("data", rank)) & set(layout.group("context", rank)) == {rank}
        assert set(layout.group("replicas", rank)) & set(layout.group("tensor", rank)) == {rank}
        assert set(layout.group("stage", rank)) & set(layout.group("pipeline", rank)) == {rank}
        experts, same = set(layout.group("expert", rank)), set(layout.group("expert_replicas", rank))
        assert experts & same == {rank}
        assert experts | same <= set(layout.group("replicas", rank))


def test_tensor_groups_are_neighbours() -> None:
    assert Layout(8, tensor=2, pipeline=2).groups("tensor") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert Layout(8, tensor=2, context=2).groups("context") == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_degrees_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"6; allowed: multiples of .* 4\. Change resources\.workers"):
        Layout(6, tensor=2, pipeline=2)
    with pytest.raises(ValueError, match=r"expert is 4; allowed: divisors of .* 6\. Change resources\.workers"):
        Layout(6, expert=4)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
def test_a_step_reads_each_sample_once(num_data_ranks: int, micro_batches: int, micro_batch_size: int, position: int) -> None:
    batch = BatchDivision(num_data_ranks * micro_batches * micro_batch_size, micro_batch_size, num_data_ranks)
    firsts = [
        batch.first_sample(position, rank, index) for rank in range(num_data_ranks) for index in range(batch.num_micro_batches)
    ]
    read = [first + offset for first in firsts for offset in range(micro_batch_size)]
    assert read == list(range(position, position + batch.global_batch_size))


def test_a_job_divides_its_batch_by_its_data_ranks(spec_document: dict[str, object]) -> None:
    spec = JobSpec.model_validate(spec_document | {"resources": {"workers": 2}})
    assert (spec.layout.data, spec.batch.micro_batch_size, spec.batch.num_micro_batches) == (2, 2, 1)
