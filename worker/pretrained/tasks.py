"""Run the tasks of a job's `evaluation` with lm-eval, on an export as a server computes it.

lm-eval reads tasks, writes prompts, scores answers and estimates standard errors; this module opens the tasks of a folder
and computes what they ask for: log-probabilities of texts, and greedy continuations. Sequences are computed one at a time.
Importing it loads lm-eval.

Shape suffixes: T tokens, V vocabulary.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from octet.api_schemas import Files
from octet.api_schemas.evaluation import HALF_WIDTH, EvaluationSpec
from octet.worker.data.tokenizer import load_tokenizer

LOCAL_DATA = ("json", "csv", "parquet", "text")
"""The readers of `datasets` that a task may name: its data are files. Hubs are not reached."""
_Z_95 = 1.959964
_BOOTSTRAPS = 1000
"""Samples of answers for the standard error of a score that is no mean, such as BLEU."""

_LONGEST_NAME = 64

Scored = tuple[float, bool]


class Served(TemplateLM):
    """A network for lm-eval. logits: of tokens (T), as (T, V). folder: of the tokenizer; None: texts are bytes."""

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        folder: Path | None,
        max_length: int,
        files: Files,
        before_each: Callable[[], None],
    ) -> None:
        super().__init__()
        self._logits, self.max_length, self._before_each = logits, max_length, before_each
        self.tokenizer = None if folder is None else load_tokenizer(folder, files)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text: a line feed where texts are bytes."""
        return ord("\n") if self.tokenizer is None else self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no other: the tokenizer's first, else its last."""
        first = None if self.tokenizer is None else self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text, without special tokens unless asked for."""
        if self.tokenizer is None:
            return list(string.encode())
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Scored]:
        """Score texts after their contexts."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Score whole texts, each token once, in windows of the longest sequence."""
        totals = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            totals.append(sum(self._score(*make_disjoint_window(window))[0] for window in windows))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Continue texts with the likeliest tokens, up to a text that a task stops at. Raises ValueError for sampling."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        asked = normalize_gen_kwargs(options)
        if asked.get("do_sample"):
            raise ValueError("a task asks for do_sample; allowed: the likeliest tokens. Remove it from generation_kwargs.")
        tokens, stops = self.tok_encode(context), [stop for stop in asked["until"] if stop]
        begin, text = len(tokens), ""
        while len(tokens) - begin < asked["max_gen_toks"] and not any(stop in text for stop in stops):
            token = int(self._compute(tokens[-self.max_length :])[-1].argmax())
            if token == self.eot_token_id:
                break
            tokens.append(token)
            text = self._decode(tokens[begin:])
        return text[: min([len(text), *(text.index(stop) for stop in stops if stop in text)])]

    def _decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace") if self.tokenizer is None else self.tokenizer.decode(tokens)

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Scored]:
        return [self._score(context, continuation) for _, context, continuation in requests]

    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> Scored:
        """Return the log-probability of a continuation, in nats, and True if each of its tokens is the likeliest.

        A context that is too long loses its first tokens. Raises ValueError for a longer continuation.
        """
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a task asks for {len(continuation)} tokens at once; allowed: at most {self.max_length}, the model's longest "
                "sequence. Shorten its answers."
            )
        tokens = [*context, *continuation][-(self.max_length + 1) :]
        log_p_TV = self._compute(tokens[:-1])[-len(continuation) :].log_softmax(-1)
        expected_T = torch.tensor(tokens[-len(continuation) :])
        is_greedy = bool((log_p_TV.argmax(-1) == expected_T).all())
        return float(log_p_TV.gather(1, expected_T[:, None]).sum()), is_greedy

    def _compute(self, tokens: Sequence[int]) -> Tensor:
        self._before_each()
        return self._logits(torch.tensor(tokens))


def open_tasks(spec: EvaluationSpec, files: Files, cache: Path) -> list[Any]:
    """Open the tasks of a folder with their data. Raises ValueError, SpecConflict, OSError, and what a task's own code does."""
    manager = TaskManager(include_path=spec.path, include_defaults=False)
    return [manager.load(_config_of(manager, name, files, cache))["tasks"][name] for name in spec.tasks]


def _config_of(manager: TaskManager, name: str, files: Files, cache: Path) -> dict[str, Any]:
    entry = manager.task_index.get(name)
    if entry is None or entry.yaml_path is None:
        raise ValueError(f"lm-eval reads no task {name} there; allowed: {', '.join(manager.all_subtasks)}")
    config = load_yaml(entry.yaml_path)
    if config.get("dataset_path") not in LOCAL_DATA:
        raise ValueError(
            f"task {name} has dataset_path {config.get('dataset_path')!r}; allowed: {', '.join(LOCAL_DATA)}, with data_files "
            "in dataset_kwargs. Hubs are not reached: write its samples to a file."
        )
    options = config.get("dataset_kwargs") or {}
    data_files = _local(options.get("data_files"), entry.yaml_path.parent, files)
    return config | {"dataset_kwargs": options | {"data_files": data_files, "cache_dir": str(cache)}}


def _local(named: Any, folder: Path, files: Files) -> Any:
    """Return data files as absolute paths: relative ones begin at their task's folder. Raises SpecConflict, OSError."""
    if isinstance(named, dict):
        return {split: _local(each, folder, files) for split, each in named.items()}
    if isinstance(named, list):
        return [_local(each, folder, files) for each in named]
    if not isinstance(named, str):
        raise ValueError(f"data_files has {named!r}; allowed: names of files, or lists of them, by split")
    path = (folder / named).resolve()
    files.open(path).close()
    return str(path)


@torch.no_grad()
def run_tasks(spec: EvaluationSpec, served: Served, files: Files) -> dict[str, float]:
    """Return the scores of a network by name, as `<task>_<metric>`, each with half its 95 % interval where lm-eval has one.

    Raises as `open_tasks`, and ValueError for a score without a valid name.
    """
    # lm-eval's own switch: it would fork a process for each core, from a rank with threads, to estimate an error.
    os.environ["DISABLE_MULTIPROC"] = "1"
    with TemporaryDirectory(prefix="octet-tasks-") as cache:
        results = simple_evaluate(
            served,
            tasks=open_tasks(spec, files, Path(cache)),
            limit=spec.limit,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
            random_seed=None,  # these three belong to training
            numpy_random_seed=None,
            torch_random_seed=None,
            task_manager=TaskManager(include_defaults=False),
        )
    assert results is not None
    return scores_of({task: results["results"][task] for task in spec.tasks})


def scores_of(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the numbers of lm-eval's results by metric, with `_half_width` for the intervals."""
    scores = dict[str, float]()
    for task, values in results.items():
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if not isinstance(value, int | float) or not filter_name:
                continue
            is_error = metric.endswith("_stderr")
            parts = (task, metric.removesuffix("_stderr"), *(() if filter_name == "none" else (filter_name,)))
            name = re.sub(r"[^a-z0-9]+", "_", "_".join(parts).lower())
            scores[f"{name}{HALF_WIDTH}" if is_error else name] = _Z_95 * value if is_error else float(value)
    if too_long := [name for name in scores if len(name) > _LONGEST_NAME]:
        raise ValueError(f"the score {too_long[0]} has no valid name; allowed: {_LONGEST_NAME} letters. Shorten its task's.")
    return scores
