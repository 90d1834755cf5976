"""Faults that a GPU would show, each planted here and found by its name; and what is in order beside each."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels.cuda.launching import Launcher
from octet.worker.mesh import Axis
from octet.worker.metrics.readback import HostCopy
from octet.worker.optim.host_states import HostStates
from tests.chip import cuda
from tests.chip.device import Chip
from tests.chip.graphs import check_host_values
from tests.chip.lies import chip_of
from tests.chip.nccl import Launched, check_order, communicators
from tests.chip.programs import checked
from tests.chip.timelines import Fault
from tests.worker.kernels.cuda.test_compiles import check_resources

ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda", 0)


@pytest.fixture
def chip() -> Iterator[Chip]:
    with chip_of(2) as chip:
        yield chip


@triton.jit
def copy_kernel(out, x, num_elements, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < num_elements, other=0.0), mask=at < num_elements)


@triton.jit
def product_kernel(out, a, b, num_rows, BLOCK: tl.constexpr, BOUND: tl.constexpr) -> None:
    """a (num_rows, BLOCK) @ b (BLOCK, BLOCK), and ReLU."""
    rows, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    at = rows[:, None] * BLOCK + columns
    product = tl.dot(tl.load(a + at, mask=rows[:, None] < num_rows, other=0.0), tl.load(b + columns[:, None] * BLOCK + columns))
    tl.store(out + at, tl.maximum(product, 0.0), mask=rows[:, None] < (num_rows if BOUND is None else BOUND))


@triton.jit
def copy_from_address_kernel(out, table, BLOCK: tl.constexpr) -> None:
    address = tl.load(table).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(address + at))


@triton.jit
def count_kernel(out, x, IS_ATOMIC: tl.constexpr) -> None:
    if IS_ATOMIC:
        tl.atomic_add(out, tl.load(x + tl.program_id(0)))
    else:
        tl.store(out, tl.load(out) + tl.load(x + tl.program_id(0)))


class TestStreams:
    @pytest.mark.parametrize("waits", [True, False])
    def test_a_missing_wait(self, chip: Chip, waits: bool) -> None:
        """The states of an offloaded optimizer are used before they have arrived, if nothing waits for their event."""
        parameters = [torch.ones(64, device=GPU) for _ in range(3)]
        states = {parameter: {"exp_avg": {"codes": torch.ones(64, device=GPU)}} for parameter in parameters}
        host = HostStates(["exp_avg"])
        for state in states.values():
            host.hold(state)

        def step() -> None:
            for parameter, _ in host.visit([(parameter, {}) for parameter in parameters], states):
                states[parameter]["exp_avg"]["codes"].add_(parameter)

        step()
        if waits:
            step()
            return
        wait_event, current = cuda.Stream.wait_event, torch.cuda.current_stream()

        def forget(stream: cuda.Stream, event: cuda.Event) -> None:
            if stream is not current:
                wait_event(stream, event)

        with mock.patch.object(cuda.Stream, "wait_event", forget), pytest.raises(Fault, match="missing wait"):
            step()

    def test_a_value_that_is_read_before_it_arrives(self, chip: Chip) -> None:
        copy = HostCopy(torch.ones(3, device=GPU))
        with pytest.raises(Fault, match=r"missing wait.*reads.*what is written by the default stream"):
            copy._host.tolist()
        assert copy.read() == [1.0] * 3

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_pinned_buffer_that_is_overwritten_too_early(self, chip: Chip, waits: bool) -> None:
        host = torch.ones(3).pin_memory()
        host.to(GPU, non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
            host.fill_(2)
            return
        with pytest.raises(Fault, match="pinned memory changed too early"):
            host.fill_(2)

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_buffer_that_is_freed_under_a_reader(self, chip: Chip, waits: bool) -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.ones(3, device=GPU)
        torch.cuda.current_stream().wait_stream(side)
        x + 1
        del x
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if waits:
                torch.ones(3, device=GPU)
                return
            with pytest.raises(Fault, match="freed under a reader"):
                torch.ones(3, device=GPU)


class TestHost:
    def test_a_pageable_copy(self, chip: Chip) -> None:
        chip.begin_step()
        torch.tensor([1.0, 2.0]).pin_memory().to(GPU, non_blocking=True)
        torch.full((3,), 2.0, device=GPU)
        assert not chip.waits
        torch.tensor([1.0, 2.0], device=GPU)
        [name] = chip.waits
        assert name.startswith("pageable copy at tests/chip/test_planted.py")

    def test_reads(self, chip: Chip) -> None:
        x = torch.ones(3, device=GPU)
        chip.begin_step()
        x[x > 0]
        float(x[0])
        x.tolist()
        assert [name.split(" at ")[0] for name in chip.waits] == ["index", "_local_scalar_dense", "pageable copy"]

    def test_memory_of_the_host(self, chip: Chip) -> None:
        with pytest.raises(Fault, match="memory of the host in a kernel"):
            torch.ones(3, device=GPU) + torch.ones(3)
        with pytest.raises(TypeError, match="can't convert cuda"):
            torch.ones(3, device=GPU).numpy()


class TestMemory:
    @pytest.mark.parametrize("is_freed", [True, False])
    def test_a_use_after_free(self, chip: Chip, is_freed: bool) -> None:
        """A table has kept the address."""
        x, out = torch.ones(64, device=GPU), torch.zeros(64, device=GPU)
        table = torch.tensor([x.data_ptr()], dtype=torch.int64).pin_memory().to(GPU)
        if not is_freed:
            copy_from_address_kernel[(1,)](out, table, 64)
            assert out.tolist() == [1.0] * 64
            return
        del x
        torch.ones(64, device=GPU)
        with pytest.raises(Exception, match="use after free"):
            copy_from_address_kernel[(1,)](out, table, 64)

    def test_memory_that_was_not_written_is_poisoned(self, chip: Chip) -> None:
        assert torch.empty(3, device=GPU).isnan().all()

    def test_a_wrong_mask_in_an_epilogue(self, chip: Chip) -> None:
        """The bound of the store is that of whole blocks."""
        a, b, out = torch.ones(20, 16, device=GPU), torch.ones(16, 16, device=GPU), torch.zeros(20, 16, device=GPU)
        product_kernel[(2,)](out, a, b, 20, 16, None)
        assert out.tolist() == [[16.0] * 16] * 20
        with pytest.raises(Exception, match=r"wrong mask: .*product_kernel.* stores to \w+, which no tensor has"):
            product_kernel[(2,)](out, a, b, 20, 16, 32)


class TestKernels:
    def test_a_race(self) -> None:
        x, out = torch.ones(8), torch.zeros(1)
        with checked():
            count_kernel[(8,)](out, x, True)
            assert out.tolist() == [8.0]
            with pytest.raises(Fault, match=r"race: programs .* of count_kernel store to one address"):
                count_kernel[(8,)](out, x, False)

    def test_a_kernel_on_the_wrong_device(self, chip: Chip) -> None:
        x, out = (torch.ones(16, device=torch.device("cuda", 1)) for _ in range(2))
        Launcher(copy_kernel)(1, out, x, 16, 16)  # which makes it the current one
        with pytest.raises(Fault, match="kernel on the wrong device"):
            copy_kernel[(1,)](out, x, 16, 16)

    def test_an_op_whose_fake_strides_lie(self, chip: Chip) -> None:
        library = torch.library.Library("chip_planted", "DEF")
        library.define("transposed(Tensor x) -> Tensor")
        library.impl("transposed", lambda x: x.clone().t(), "CPU")
        torch.library.register_fake("chip_planted::transposed", lambda x: x.new_empty(x.shape[::-1]), lib=library)
        with pytest.raises(Fault, match="fake strides lie"):
            torch.ops.chip_planted.transposed(torch.ones(2, 3, device=GPU))
        library._destroy()

    @pytest.mark.system
    def test_a_spill(self, tmp_path: Path) -> None:
        """A kernel of ours that gets too few registers: ptxas is asked, in a process where Triton compiles."""
        program = (
            "import json\nfrom tests.worker.kernels.cuda import compiled\n"
            "compiled.quantization.TILE_REGISTERS = {}\n"
            "name, kernel, constants = next(compiled.kernels(spread=True))\n"
            "made = compiled.compile_kernel(name, kernel, constants)\n"
            "print(json.dumps({{name: compiled.resources(made) | {{'threads': 256}}}}))"
        )
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(tmp_path)

        def kernels(num_registers: int) -> Any:
            command = [sys.executable, "-c", program.format(num_registers)]
            result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
            assert result.returncode == 0, result.stderr
            return json.loads(result.stdout)

        check_resources(kernels(128), "90", is_pinned=True)
        with pytest.raises(AssertionError, match=r"quantize_tile.*stack|quantize_tile tensor"):
            check_resources(kernels(24), "90", is_pinned=True)


class TestGraphs:
    def captured(self, x: Tensor, factor: float) -> tuple[Any, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = (x * factor).sum()
        return graph, result

    def test_a_replay_runs_with_poisoned_memory(self, chip: Chip) -> None:
        x = torch.ones(3, device=GPU)
        graph, result = self.captured(x, 2.0)
        for factor in (1, 2):
            graph.replay()
            assert result.item() == 6.0 * factor
            x *= 2

    def test_a_host_value_in_a_graph(self, chip: Chip) -> None:
        x = torch.ones(3, device=GPU)
        (one, _), (same, _), (other, _) = (self.captured(x, factor) for factor in (2.0, 2.0, 3.0))
        check_host_values(one, same)
        with pytest.raises(Fault, match=r"host value in a graph: mul.*2\.0.*3\.0"):
            check_host_values(one, other)

    def test_a_capture_that_allocates(self, chip: Chip) -> None:
        capture, aside = torch.cuda.graph(torch.cuda.CUDAGraph()), torch.cuda.stream(torch.cuda.Stream())
        with pytest.raises(Fault, match="capture that allocates"), capture, aside:
            torch.empty(3, device=GPU)

    def test_a_capture_that_waits(self, chip: Chip) -> None:
        x = torch.ones(3, device=GPU)
        with pytest.raises(Fault, match="wait in a capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.sum().item()
        with pytest.raises(Fault, match="pageable copy"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.tensor([1.0, 2.0], device=GPU)

    def test_a_graph_that_reads_freed_memory(self, chip: Chip) -> None:
        x = torch.ones(3, device=GPU)
        graph, _ = self.captured(x, 2.0)
        graph.replay()
        del x
        torch.ones(3, device=GPU)
        with pytest.raises(Fault, match="use after free: the replay of mul"):
            graph.replay()

    def test_a_graph_whose_table_has_an_address_of_freed_memory(self, chip: Chip) -> None:
        x, out = torch.ones(64, device=GPU), torch.zeros(64, device=GPU)
        table = torch.tensor([x.data_ptr()], dtype=torch.int64).pin_memory().to(GPU)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            copy_from_address_kernel[(1,)](out, table, 64)
        assert out.tolist() == [0.0] * 64
        graph.replay()
        assert out.tolist() == [1.0] * 64
        del x
        torch.ones(64, device=GPU)
        with pytest.raises(Exception, match="use after free"):
            graph.replay()


class TestCommunicators:
    @pytest.fixture
    def axis(self, chip: Chip) -> Iterator[Axis]:
        with communicators(chip):
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=GPU)
            yield Axis("data", 2, 0, GPU)  # of two ranks, whose other one is not there
            gc.collect()  # graphs of a test, which tracebacks hold
            dist.destroy_process_group()

    def test_a_list_gather(self, axis: Axis) -> None:
        own, into = torch.ones(4, device=GPU), torch.zeros(1, 4, device=GPU)
        assert torch.equal(axis.start_gather(own, into).wait()[0], own)
        with pytest.raises(Fault, match="list gather"):
            dist.all_gather([torch.zeros(4, device=GPU)], own)

    def test_a_collective_that_is_not_waited_for(self, axis: Axis) -> None:
        pending = axis.start_gather(torch.ones(4, device=GPU), torch.zeros(1, 4, device=GPU))
        with pytest.raises(Fault, match=r"missing wait.*the stream of communicator"):
            pending._result.add(1)
        pending.wait().add(1)

    def test_a_captured_collective_is_sent_by_each_replay(self, axis: Axis) -> None:
        x, graph = torch.ones(4, device=GPU), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gathered = axis.start_gather(x * 2, torch.empty(1, 4, device=GPU)).wait() + 1
        for factor in (1, 2):
            graph.replay()
            assert gathered.tolist() == [[2.0 * factor + 1] * 4]
            x *= 2

    def test_a_communicator_that_is_destroyed_before_a_graph(self, axis: Axis) -> None:
        x, graph = torch.ones(4, device=GPU), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            axis.start_gather(x, torch.empty(1, 4, device=GPU)).wait()
        with pytest.raises(Fault, match="communicator destroyed under a graph"):
            dist.destroy_process_group()

    def test_a_captured_collective_that_is_not_waited_for(self, axis: Axis) -> None:
        own, into = torch.ones(4, device=GPU), torch.zeros(1, 4, device=GPU)
        pending = []
        with pytest.raises(Fault, match="capture with work under way: 1 coll"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            pending.append(axis.start_gather(own, into))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pending.append(axis.start_gather(own, into))
            into.add_(1)
            pending[-1].wait()
        with pytest.raises(Fault, match=r"missing wait: the replay of add_.*the stream of communicator"):
            graph.replay()

    def test_what_a_capture_of_nccl_refuses(self, axis: Axis) -> None:
        x = torch.ones(4, device=GPU)
        for kind, call in {
            "communicator made in a capture": lambda: dist.new_group([0]),
            "list gather": lambda: dist.all_gather([torch.zeros(4, device=GPU)], x),
            "wait in a capture": dist.barrier,
            "unknown in a capture": lambda: dist.send(x, 0),
            "memory of the host in a kernel": lambda: dist.all_reduce(torch.ones(4)),
        }.items():
            with pytest.raises(Fault, match=kind), torch.cuda.graph(torch.cuda.CUDAGraph()):
                call()

    def test_a_collective_that_one_rank_has_recorded(self) -> None:
        one, other, launched = (Launched("all_reduce", "axis", (0, 1), (), "here", graph) for graph in (3, 4, None))
        check_order([[launched, one, one], [launched, one, one]])
        for found in (other, launched):
            with pytest.raises(Fault, match=r"recorded otherwise on another rank: all_reduce of axis at here: {0: 3, 1: "):
                check_order([[one], [found]])

    def test_communicators_in_another_order(self) -> None:
        first, second = (Launched("all_reduce", name, (0, 1), (), "here") for name in ("axis", "twin"))
        check_order([[first, second], [first, second]])
        with pytest.raises(Fault, match="communicators in another order: rank 0 waits in all_reduce of axis"):
            check_order([[first, second], [second, first]])

    def test_sends_that_block(self) -> None:
        def transfers(*peers: tuple[bool, int]) -> Launched:
            return Launched("transfers", "pipeline", (0, 1), peers, "here")

        check_order([[transfers((True, 1)), transfers((False, 1))], [transfers((False, 0)), transfers((True, 0))]])
        check_order([[transfers((True, 1), (False, 1))], [transfers((True, 0), (False, 0))]])
        with pytest.raises(Fault, match="rank 0 waits in transfers"):
            check_order([[transfers((True, 1)), transfers((False, 1))], [transfers((True, 0)), transfers((False, 0))]])
