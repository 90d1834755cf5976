"""The demo's job: what is trained, on which text, for how long, and from how many steps on it is judged."""

import sysconfig

from octet.api_schemas import JobSpec
from octet.client.job_file import check_spec

_NOT_EVERYWHERE = ("test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "macholib", "ensurepip", "distutils")
_NO_CODE = ("encodings", "pydoc_data")
_NOT_THE_LIBRARY = ("site-packages", "dist-packages", "__pycache__")
_LEFT_OUT = [f"**/{folder}/**" for folder in _NOT_EVERYWHERE + _NO_CODE + _NOT_THE_LIBRARY] + ["_sysconfigdata*"]
"""Folders that distributions leave out, so that the text hardly depends on who built this Python; and tables and prose, which
the evaluation of a model of code should not measure (`pydoc_data/topics.py` alone was half of the evaluation text)."""

JUDGED_FROM_STEPS = 300
"""After so many steps three libraries were measured: see `demo_spec`. `LARGEST_SHARE_OF_ENTROPY` leaves them 8 points."""


def is_long_enough_to_judge(spec: JobSpec) -> bool:
    """Return True if a model that trains for so many steps should have learned."""
    return spec.training.steps is not None and spec.training.steps >= JUDGED_FROM_STEPS


def demo_spec(level: str, steps: int, comparison: str) -> JobSpec:
    """Return a job of gpt-tiny (0.86 M parameters) on the standard library's source, 2048 bytes a step.

    Measured at fp32, evaluation loss after 300 steps as a share of the unigram entropy: 69 % on the library of Debian's Python
    3.11.2, 72 % on that of 3.11.7 and 69 % on that of 3.12.1, both built from source. 300 steps take 41 s on one quiet core.
    """
    document = {
        "name": f"demo-{level}",
        "model": {"family": "gpt", "preset": "gpt-tiny"},
        "precision": {"level": level},
        "data": {
            "source": "text",
            "path": sysconfig.get_path("stdlib"),
            "include": ["**/*.py"],
            "exclude": _LEFT_OUT,
        },
        "training": {
            "steps": steps,
            "global_batch_size": 16,
            "sequence_length": 128,
            "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]},
            "schedule": {"name": "cosine", "warmup_steps": min(20, steps // 10)},
            "gradient_clip": 1.0,
            "eval_every": 100,
            "checkpoint_every": 100,
            "seed": 0,
        },
        "resources": {"pool": "cpu", "workers": 1},
        "retry": {"max_failures": 1},
        "labels": {"comparison": comparison},
    }
    return check_spec(document, f"the demo's job at level {level}")
