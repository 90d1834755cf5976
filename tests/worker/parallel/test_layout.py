"""A bucket's shares cover each parameter once, are equal, and are never cut inside a block of 128 elements."""

from hypothesis import given
from hypothesis import strategies as st

from octet.api_schemas.bucket_layout import ALIGNMENT, BucketLayout, fill_buckets

SIZES = st.lists(st.sampled_from([0, 1, 5, 127, 128, 129, 255, 4096, 5000]), min_size=1, max_size=6)


@given(sizes=SIZES, num_ranks=st.integers(1, 7))
def test_pieces_cover_each_parameter_once(sizes: list[int], num_ranks: int) -> None:
    layout = BucketLayout(tuple(sizes), num_ranks)
    covered: list[list[int]] = [[] for _ in sizes]
    for rank in range(num_ranks):
        pieces = layout.pieces(rank)
        assert len({piece.index for piece in pieces}) == len(pieces)
        for piece in pieces:
            assert piece.first % ALIGNMENT == 0
            assert piece.start % ALIGNMENT == 0
            assert piece.start + piece.length <= layout.share_size
            covered[piece.index] += piece.elements
    assert covered == [list(range(size)) for size in sizes]


@given(sizes=SIZES, num_ranks=st.integers(1, 7))
def test_a_piece_lies_in_the_buffer_where_its_elements_do(sizes: list[int], num_ranks: int) -> None:
    layout = BucketLayout(tuple(sizes), num_ranks)
    for rank in range(num_ranks):
        for piece in layout.pieces(rank):
            assert rank * layout.share_size + piece.start == layout.offsets[piece.index] + piece.first


@given(sizes=SIZES, num_ranks=st.integers(1, 7))
def test_padding_is_less_than_a_block_for_each_parameter_and_each_rank(sizes: list[int], num_ranks: int) -> None:
    padded = BucketLayout(tuple(sizes), num_ranks).share_size * num_ranks
    assert padded - sum(sizes) < ALIGNMENT * (len(sizes) + num_ranks)


@given(sizes=SIZES, max_elements=st.integers(1, 6000))
def test_buckets_take_parameters_in_order_up_to_their_limit(sizes: list[int], max_elements: int) -> None:
    buckets = fill_buckets(sizes, max_elements)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(sizes[index] for index in bucket) <= max_elements
