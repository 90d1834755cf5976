"""The result of a collective that runs while other work goes on."""

import torch.distributed as dist
from torch import Tensor


class Pending:
    """A collective that is under way. It keeps the tensors alive that the backend still reads."""

    def __init__(self, result: Tensor, work: dist.Work | None = None, read: Tensor | None = None) -> None:
        """read: the tensor that is being sent."""
        self._result, self._work, self._read = result, work, read

    def wait(self) -> Tensor:
        """Wait, on CUDA only the current stream, and return the result."""
        if self._work is not None:
            self._work.wait()
        self._work = self._read = None
        return self._result
