"""`training.deterministic`: a GPU computes a job to the same bits in every run, so a resumed run equals one that went through.

A CPU does so anyway. On a GPU, by default, attention's backward pass, gradients of embeddings and cuBLAS may add in an order
that changes from run to run. Our own kernels add in a fixed order; across programs they only take maxima.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic as uninitialized

_CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With workspaces of a fixed size cuBLAS computes the same on each of its streams, as NVIDIA's documentation has it."""


@contextmanager
def deterministic(is_on: bool) -> Iterator[None]:
    """Inside, if is_on, torch takes the deterministic algorithm of every operation, and raises RuntimeError where it has none.

    Attention is flash attention, whose backward pass has such an algorithm, or plain. torch.compile measures no times for
    choices that change bits, as it does to pad a product. Enter it before the first product on CUDA.
    """
    if not is_on:
        yield
        return
    from torch._inductor import config as inductor  # only such a run needs it

    os.environ.setdefault(*_CUBLAS_WORKSPACE)
    was_on, warned_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = uninitialized.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    uninitialized.fill_uninitialized_memory = False  # every element is written before it is read
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]), inductor.patch(deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        uninitialized.fill_uninitialized_memory = filled
