"""The result of a collective that runs while other work goes on."""

from contextlib import nullcontext

import torch.distributed as dist
from torch import Tensor

from worker.mesh.waits import Call


class Pending:
    """A collective that is under way. It keeps the tensors alive that the backend still reads."""

    def __init__(
        self, result: Tensor, work: dist.Work | None = None, read: Tensor | None = None, call: Call | None = None
    ) -> None:
        """read: the tensor that is being sent. call: told while this rank waits."""
        self._result, self._work, self._read, self._call = result, work, read, call

    def wait(self) -> Tensor:
        """Wait, on CUDA only the current stream, and return the result."""
        if self._work is not None:
            with self._call or nullcontext():
                self._work.wait()
        self._work = self._read = None
        return self._result
