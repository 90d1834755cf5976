"""The forward and backward passes of one step on one rank, and the algorithms that they may take."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.backends.cuda import math_sdp_enabled
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel
from torch.utils import deterministic as uninitialized

from octet.worker.common.config import TrainConfig
from octet.worker.common.errors import InvalidConfig
from octet.worker.data.order import seed_of
from octet.worker.data.prefetch import MicroBatch, Prefetcher
from octet.worker.kernels.torch_private import inductor_config
from octet.worker.mesh import Mesh
from octet.worker.metrics.table import Metrics
from octet.worker.parallel.rank_random import seed_generators
from octet.worker.train.build import JobModel

_CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With workspaces of a fixed size cuBLAS computes the same on each of its streams (NVIDIA's
documentation).
"""


def forward_backward(
    job: JobModel, batches: Prefetcher, config: TrainConfig, position: int, mesh: Mesh, metrics: Metrics
) -> tuple[Tensor, float]:
    """Accumulate this rank's gradients over its micro-batches of the step that begins at
    `position`.

    Returns the rank's mean loss, fp32 (), and the seconds spent on data.
    """
    num_micro_batches, wait_s = config.batch.num_micro_batches, _Seconds(metrics)
    if job.parallel.pipeline is not None:
        # All stages of a data rank read the same samples: small, next to the hidden states that travel.
        taken = [wait_s.take(batches, position, index) for index in range(num_micro_batches)]
        samples, divisors = [batch.samples for batch in taken], [batch.divisor for batch in taken]
        with job.parallel.no_sync(), torch.enable_grad():
            return job.parallel.pipeline.forward_backward(samples, divisors, metrics), wait_s.total

    losses = []
    for index in range(num_micro_batches):
        batch = wait_s.take(batches, position, index)
        # Drop path draws the same for a sample on any number of ranks.
        seed_generators(mesh.device, seed_of("draws of the model", config.seed, batch.first))
        is_last = index == num_micro_batches - 1
        losses.append(
            job.graph.forward_backward(
                batch.samples,
                batch.divisor,
                metrics,
                is_first=index == 0,
                context=job.parallel.no_sync(not is_last),
                exchange=job.parallel.synchronize if is_last else None,
            )
        )
    return torch.stack(losses).sum(), wait_s.total


class _Seconds:
    """Adds up the seconds that a step waits for data."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics, self.total = metrics, 0.0

    def take(self, batches: Prefetcher, position: int, index: int) -> MicroBatch:
        with self.metrics.timed("data_wait") as wait:
            batch = batches.micro_batch(position, index)
        self.total += wait.seconds
        return batch


@contextmanager
def deterministic(is_on: bool) -> Iterator[None]:
    """Inside, if is_on, torch takes the deterministic algorithm of every operation
    (`training.deterministic`).

    A GPU then computes a job to the same bits in every run, so a resumed run equals one that went
    through; a CPU does so anyway. By default, on a GPU, attention's backward pass, gradients of
    embeddings and cuBLAS may add in an order that changes from run to run. Our own kernels add in a
    fixed order; across programs they only take maxima.

    Attention is flash attention, whose backward pass has such an algorithm, or plain. torch.compile
    measures no times for choices that change bits, such as padding a product. Enter it before the
    first product on CUDA. Raises RuntimeError, at the operation, where it has no deterministic
    algorithm.
    """
    if not is_on:
        yield
        return
    inductor = inductor_config()

    os.environ.setdefault(*_CUBLAS_WORKSPACE)
    was_on, warned_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = uninitialized.fill_uninitialized_memory
    backends = [SDPBackend.FLASH_ATTENTION, *([SDPBackend.MATH] if math_sdp_enabled() else [])]  # see `attention_kernel`
    torch.use_deterministic_algorithms(True)
    uninitialized.fill_uninitialized_memory = False  # every element is written before it is read
    try:
        with sdpa_kernel(backends), inductor.patch(deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        uninitialized.fill_uninitialized_memory = filled


@contextmanager
def attention_kernel(name: str, device: torch.device) -> Iterator[None]:
    """Inside, attention runs in FlashAttention-3 if name is fa3 (`training.attention_kernel`).

    torch's registry puts the package's ops below `scaled_dot_product_attention` and
    `kernels.document_attention`, and passes on that a run is `deterministic`. torch's other kernels
    are off: what FlashAttention-3 does not take is then an error and never other bits.

    Raises InvalidConfig where it cannot run: another device, or no package.
    """
    if name == "torch":
        yield
        return
    found = "a CPU"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found = f"compute capability {major}.{minor}"
    if found != "compute capability 9.0":
        raise InvalidConfig(
            f"training.attention_kernel: fa3, and this rank runs on {found}; allowed: fa3 on compute capability 9.0, as H100 "
            "and H200 have. Set training.attention_kernel to torch, or choose a pool of such devices."
        )
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError) as error:
        raise InvalidConfig(
            f"training.attention_kernel: fa3, and this rank cannot load the package flash_attn_3 ({error}); allowed: fa3 where "
            "it is installed for the rank's torch. Install it from the folder hopper of github.com/Dao-AILab/flash-attention "
            "on every node of the pool, or set training.attention_kernel to torch."
        ) from error
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        restore_flash_attention_impl()
