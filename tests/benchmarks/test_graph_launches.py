"""Launches of compiled blocks are counted without a GPU, and the amaxes that graphs find are not looked for by our ops."""

import pytest

from worker.fp8 import operand, usual

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo's own doing
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.mark.matrix
def test_a_compiled_block_reads_less_where_amaxes_are_found_in_its_kernels() -> None:
    from benchmarks.gpu.graph_launches import compiled_block  # loads Inductor, which warns as it is loaded

    found = compiled_block("llama", "O2", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operand, "amax_in_graph", lambda *_x: None)
        patch.setattr(usual, "amax_in_graph", lambda *_x: None)
        before = compiled_block("llama", "O2", {})
    num_weights = 7  # whose gradients are rounded outside of the graph, which looks for an amax each
    assert (found.by_name["_amax_flat"], before.by_name["_amax_flat"]) == (num_weights, num_weights + 11)
    assert found.by_name.total() < before.by_name.total()
    assert found.by_name["_scaled_mm"] == before.by_name["_scaled_mm"] == 3 * num_weights
    assert found.num_bytes < 0.92 * before.num_bytes
