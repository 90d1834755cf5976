"""The mesh of ranks: which ranks meet on which axis, which rank reports, which ranks own a loss."""

import ipaddress
import os
import socket
from collections import Counter
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, get_args

import torch
import torch.distributed as dist

from octet.api_schemas import AxisName, Layout
from octet.worker.common.config import RankEnv
from octet.worker.common.errors import CollectiveFailed, Stopped
from octet.worker.mesh.agreement import Agreement, longest_s
from octet.worker.mesh.axes import Axes, make_axes
from octet.worker.mesh.recorder import switch_on
from octet.worker.mesh.stragglers import Straggler
from octet.worker.mesh.waits import Waits

DEFAULT_TIMEOUT_S = 600.0
_MEETING_TIMEOUT = timedelta(minutes=10)


class Mesh(Axes):
    """The axes of a job, as a context manager: process groups exist inside it.

    A single rank has no group, and every collective is the identity.
    """

    def __init__(
        self, env: RankEnv, device: torch.device, layout: Layout | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """layout: degrees of parallelism; by default all ranks are data parallel. timeout_s: longest wait in a collective."""
        self.device = device
        self.waits = Waits()
        self._env = env
        self.layout = layout or Layout(env.world_size)
        self._timeout_s = timeout_s
        self._agreement: Agreement | None = None

    def __enter__(self) -> Self:
        env, timeout_s = self._env, self._timeout_s
        if env.world_size > 1:
            store, is_ours = _meet(env)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            if backend == "nccl":
                switch_on()
                # Ranks launch collectives of several communicators in one order. NCCL lets the device keep it, whichever
                # stream is late: otherwise kernels of two communicators could wait for each other's place on the device.
                os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
                # NCCL would register the buffers of recorded collectives. With expandable segments, which ranks have, that
                # ends in illegal accesses (Megatron-LM refuses the two together, core/transformer/cuda_graphs.py).
                os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            timeout = timedelta(seconds=timeout_s + longest_s(env.world_size))  # later than ours: the ranks have agreed then
            # With the device NCCL connects every group when it is made. Without, the first collective of each would
            # connect it: in the middle of the first step, where the ranks wait and memory is already taken.
            connected_to = self.device if backend == "nccl" else None
            dist.init_process_group(
                backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout, device_id=connected_to
            )
            self._agreement = Agreement(store, env.rank, env.world_size, self.waits, timeout_s, holds_store=is_ours)
        axes = make_axes(self.layout, env.rank, self.device)
        for axis in axes.values():
            axis.waits = self.waits
        self.set_axes(self.layout, axes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the groups. After an error that is not agreed on, all ranks raise the same RanksFailed in its place."""
        if self._agreement is None:
            return
        try:
            if error is None:
                with self.waits.call("barrier", "world"):
                    dist.barrier()
        except CollectiveFailed as failure:
            error = failure
        if isinstance(error, Exception) and not isinstance(error, Stopped):
            raise self._agreement.settle(error) from error
        self._agreement.close()
        if error is None:  # otherwise the other ranks may be gone, and leaving the groups would wait for them
            dist.destroy_process_group()

    @property
    def reports(self) -> bool:
        """True if this rank reports and writes what all ranks share."""
        return self.world.is_first

    @property
    def owns_loss(self) -> bool:
        """True if this rank's loss counts: one rank for each share of the tokens, in the last stage of the pipeline."""
        return self.pipeline.rank == self.pipeline.size - 1 and self.tensor.is_first

    @property
    def sent_bytes(self) -> Counter[tuple[str, str]]:
        """Bytes of tensors that this rank sent, over all axes, by collective and by the dtype of the values."""
        axes = {self[name] for name in get_args(AxisName)}
        return sum((axis.sent_bytes for axis in axes if axis.sent_bytes), Counter())

    def new_straggler(self) -> Straggler | None:
        """Return a rank that holds the others up, once when it is found, on the first rank."""
        return self._agreement.stragglers.take() if self._agreement is not None else None


def _meet(env: RankEnv) -> tuple[Any, bool]:
    """Open the store where the ranks meet. Returns it, and whether the first rank holds it; under torchrun its agent does.

    Ranks that meet on loopback are all on this machine, and listen there alone.
    """
    runs_under_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # its agent listens there already
    is_first, host = env.rank == 0 and not runs_under_torchrun, env.master_address
    listen_fd = None
    if _is_loopback(host):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, _loopback_interface())
        if is_first:  # given a port alone, the store listens on every address
            server = socket.create_server((host, env.master_port), backlog=env.world_size)
            listen_fd = server.detach()
    store = dist.TCPStore(
        host,
        env.master_port,
        env.world_size,
        is_master=is_first,
        timeout=_MEETING_TIMEOUT,
        master_listen_fd=listen_fd,
    )
    if runs_under_torchrun:  # the agent's store outlives its workers: each start has keys of its own, as torch has it
        return dist.PrefixStore(f"/worker/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store), False
    return store, True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 4 and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
