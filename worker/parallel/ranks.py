"""The group of ranks: meeting, agreeing on numbers, parting."""

from collections import Counter
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from worker.config import RankEnv

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class Ranks:
    """A context: the process group exists inside it. With one rank there is none, and every reduction is the identity."""

    def __init__(self, env: RankEnv, device: torch.device) -> None:
        self.rank = env.rank
        self.world_size = env.world_size
        self.device = device
        self.sent_bytes: Counter[str] = Counter()  # of gradients, by the dtype they travel in
        self._env = env

    def __enter__(self) -> Self:
        if self.world_size > 1:
            store = dist.TCPStore(
                self._env.master_address,
                self._env.master_port,
                self.world_size,
                is_master=self.rank == 0,
                timeout=_COLLECTIVE_TIMEOUT,
            )
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world_size, timeout=_COLLECTIVE_TIMEOUT
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After an error the other ranks may be gone: leaving the group would wait for them.
        if self.world_size > 1 and error is None:
            dist.barrier()
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over the ranks, in float64."""
        if self.world_size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(number) for number in total]

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return self.sum(float(flag))[0] > 0

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor
