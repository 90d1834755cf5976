"""Record the runs of runs.py: `python -m tests.golden.roads` writes roads.json.

Each run's losses are kept as numbers; its states and checkpoint as hashes. roads.json is never written to make a test pass: a
change of it is a change of the numbers.
"""

import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from octet.api_schemas import CheckpointReport, EvaluationReport, EventReport, JobSpec, StepReport
from octet.worker.common.config import RankEnv, resolve
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer
from tests.golden import record
from tests.golden.runs import Run, all_runs, document
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.text import write_corpus
from tests.kit.training import Recorder
from tests.worker.parallel.compiled_runs import compiling_with

ROADS = Path(__file__).with_name("roads.json")
COUNTED_STEPS = {16: "sampled step", 20: "plain step"}
"""The steps in which ops are counted. By then all graphs are compiled, and windows of delayed scaling are full."""
NEVER = 1_000_000
TIMES = ("seconds", "wall_s")
TIMED = ("rank.straggler",)
"""Events that depend on how fast a rank computes."""
Result = dict[str, Any]


class Ops(TorchDispatchMode):
    """Counts the ops of octet by name, and torch's ops in one number. Views count as none."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.ours: Counter[str] = Counter()
        self.num_torch = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled blocks run compiled while this mode is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Float8Gradient) for kind in types):
            return NotImplemented  # what it does with codes and scales is counted next
        if isinstance(func, HigherOrderOperator):  # of a compiled graph, around the op that it calls
            self.ours[args[0]._name.removeprefix("octet::").removesuffix(".default")] += 1
        elif func.namespace == "octet":
            self.ours[func.overloadpacket.__name__] += 1
        elif func.namespace == "aten" and not func.is_view:
            self.num_torch += 1
        return func(*args, **(kwargs or {}))


class CountingTrainer(Trainer):
    """Counts the ops of COUNTED_STEPS."""

    ops: dict[str, Result]

    def step(self) -> None:
        """Take one optimizer step."""
        self.ops = getattr(self, "ops", {})
        self.log.num_steps = NEVER  # steps are else read in intervals of so many seconds, whose ops would count here
        name = COUNTED_STEPS.get(self.progress.step + 1)
        # torch cannot make the bias of attention over context ranks inside a mode.
        if name is None or self.config.parallelism.context > 1:
            super().step()
            return
        with Ops() as ops:
            super().step()
        found = {"ours": dict(sorted(ops.ours.items())), "torch": ops.num_torch}
        self.ops[name] = found


def machine() -> str:
    """Hash some arithmetic, that of 16 bits too: other processors have other last bits."""
    x = record.uneven(96, 64)
    half = x.bfloat16()
    attended = functional.scaled_dot_product_attention(*(half.view(2, 2, 24, 64) for _ in range(3)), is_causal=True)
    return record.machine() + record.digest([half @ half.t(), x.half() @ x.half().t(), attended])


@contextmanager
def on_road(road: str) -> Iterator[None]:
    """Let jobs take a road inside."""
    torch.compiler.reset()
    with nullcontext() if road == "cpu" else cpu_as_accelerator(), compiling_with("aot_eager"):
        yield


def train(run: Run, env: RankEnv, corpus: Path, folder: Path) -> Result:
    """Train a run on this rank and return its results."""
    torch.set_num_threads(1)
    config = resolve(JobSpec.model_validate(document(run, corpus)), env)
    recorder, job_dir = Recorder(), folder / hashlib.sha256(str(run).encode()).hexdigest()[:16]
    with on_road(run.road), Mesh(env, torch.device("cpu"), config.layout) as mesh:
        trainer = CountingTrainer(config, mesh, recorder, job_dir)
        summary = trainer.run()
        model, optimizer = (
            exact_state_dict(trainer.model),
            trainer.optimizer.state_dict(),
        )  # under ZeRO, all ranks join the states
        sent = sorted(mesh.sent_bytes.items())
        sent_bytes = {" ".join(key): num_bytes for key, num_bytes in sent if "float64" not in key}
    steps = recorder.of(StepReport)
    result: Result = {
        "losses": [report.loss for report in steps],
        "gradient_norms": hash_of([report.gradient_norm for report in steps]),
        "evaluations": [report.loss for report in recorder.of(EvaluationReport)],
        "model": record.digest(model),
        "optimizer": record.digest(optimizer),
        "memory_bytes": summary.memory_bytes,
        "sent_bytes": sent_bytes,  # without float64, in which ranks report as often as their clocks say
        "events": [event_of(report) for report in recorder.of(EventReport) if report.type not in TIMED],
        "ops": trainer.ops,
    }
    saved = recorder.of(CheckpointReport)
    if saved:
        result["checkpoint"] = checkpoint_of(job_dir / "checkpoints" / saved[-1].name)
    return result


def event_of(report: EventReport) -> str:
    """Describe an event without its times."""
    data = {name: value for name, value in report.data.items() if name not in TIMES}
    return f"{report.type} {json.dumps(data, sort_keys=True)}"


def checkpoint_of(folder: Path) -> dict[str, str]:
    """Hash the names, dtypes and shapes of a checkpoint's tensors, and their values."""
    parts, values = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            for name in sorted(file.keys()):
                tensor: Tensor = file.get_tensor(name)
                parts[f"{path.name} {name}"] = f"{tensor.dtype} {list(tensor.shape)}"
                values[f"{path.name} {name}"] = tensor
    return {"parts": f"{len(parts)} {hash_of(parts)}", "values": record.digest(values)}


def hash_of(value: Any) -> str:
    """Hash what JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def train_on_rank(rank: int, runs: list[Run], ports: list[int], corpus: str, folder: str) -> None:
    """Train runs as one of two ranks. ports: of the rendezvous, by run."""
    results = {}
    for run, port in zip(runs, ports, strict=True):
        env = RankEnv(rank=rank, world_size=2, master_port=port)
        results[str(run)] = train(Run(*run), env, Path(corpus), Path(folder))
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))


def train_on_two_ranks(runs: Iterable[Run], corpus: Path, folder: Path) -> list[dict[str, Result]]:
    """Return the results of each rank, by run. Two processes do all runs, since starting them takes longer than a run."""
    chosen = list(runs)
    run_ranks(train_on_rank, (chosen, [free_port() for _ in chosen], str(corpus), str(folder)), 2)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def record_all(runs: Iterable[Run]) -> dict[str, Result]:
    """Train runs and return their results, by key."""
    chosen = list(runs)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder / "corpus")
        found = {str(run): train(run, RankEnv(), corpus, folder) for run in chosen if run.num_ranks == 1}
        of_two = [run for run in chosen if run.num_ranks == 2]
        return found | (train_on_two_ranks(of_two, corpus, folder)[0] if of_two else {})


def as_text(golden: Result) -> str:
    """Write JSON with a line for each result of a run, so that a diff shows which of them has changed."""
    lines = [f' "machine": {json.dumps(golden["machine"])},', ' "runs": {']
    for name, result in sorted(golden["runs"].items()):
        fields = ",\n".join(f"   {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in result.items())
        lines += [f"  {json.dumps(name)}: {{", f"{fields}\n  }},"]
    lines[-1] = lines[-1].removesuffix(",")
    return "\n".join(["{", *lines, " }", "}", ""])


def main() -> None:
    words = sys.argv[1:]
    runs = [run for run in all_runs() if all(word in str(run) for word in words)]
    known = json.loads(ROADS.read_text())["runs"] if ROADS.exists() and words else {}
    ROADS.write_text(as_text({"machine": machine(), "runs": known | record_all(runs)}))


if __name__ == "__main__":
    main()
