"""The mesh of ranks: which ranks meet on which axis, which rank reports, which ranks own a loss."""

from collections import Counter
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from api_schemas import AxisName, Layout
from worker.config import RankEnv
from worker.mesh.axis import Axis

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class Mesh:
    """A context manager: process groups exist inside it. A single rank has no group, and every collective is the identity.

    world: all ranks; they stop together. data: ranks that train the same layers on different sequences and average
    gradients. tensor: ranks that share each layer. pipeline: ranks that hold consecutive layers. stage: data and tensor
    together; these ranks agree on the state of FP8 scaling.
    """

    world: Axis
    pipeline: Axis
    data: Axis
    tensor: Axis
    stage: Axis

    def __init__(self, env: RankEnv, device: torch.device, layout: Layout | None = None) -> None:
        """layout: degrees of parallelism; by default all ranks are data parallel."""
        self.device = device
        self._env = env
        self._layout = layout or Layout(env.world_size)

    def __enter__(self) -> Self:
        if self._env.world_size > 1:
            store = dist.TCPStore(
                self._env.master_address,
                self._env.master_port,
                self._env.world_size,
                is_master=self._env.rank == 0,
                timeout=_COLLECTIVE_TIMEOUT,
            )
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=self._env.rank, world_size=self._env.world_size, timeout=_COLLECTIVE_TIMEOUT
            )
        self.world = self._axis("world")
        self.pipeline = self._axis("pipeline")
        self.data = self._axis("data")
        self.tensor = self._axis("tensor")
        self.stage = self._axis("stage")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After an error the other ranks may be gone, and leaving the group would wait for them.
        if self._env.world_size > 1 and error is None:
            dist.barrier()
            dist.destroy_process_group()

    @property
    def reports(self) -> bool:
        """True if this rank reports and writes what all ranks share."""
        return self.world.is_first

    @property
    def owns_loss(self) -> bool:
        """True if this rank's loss counts: one rank for each share of the batch, in the last stage of the pipeline."""
        return self.pipeline.rank == self.pipeline.size - 1 and self.tensor.is_first

    @property
    def sent_bytes(self) -> Counter[str]:
        """Bytes of tensors that this rank sent, over all axes, by the dtype of the values."""
        total: Counter[str] = Counter()
        for axis in (self.world, self.pipeline, self.data, self.tensor, self.stage):
            for (_, dtype), num_bytes in axis.sent_bytes.items():
                total[dtype] += num_bytes
        return total

    def _axis(self, name: AxisName) -> Axis:
        """Create the axis through this rank. torch requires that every rank creates every group; a world axis needs none."""
        ranks, group = self._layout.group(name, self._env.rank), None
        if 1 < len(ranks) < self._layout.num_ranks:
            made = {members: dist.new_group(list(members)) for members in self._layout.groups(name)}
            group = made[ranks]
        return Axis(name, len(ranks), ranks.index(self._env.rank), self.device, group)
