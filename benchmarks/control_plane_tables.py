"""Share among the benchmarks of the control plane: their options, rounds in which the trees take turns, and the table."""

import argparse
import os
import sqlite3
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

Measure = Callable[[Path, Path, Path], dict[str, float]]
"""Measures a tree once, given an empty folder and a text to train on. The keys name figure and unit."""


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """Make the parser of the options that all benchmarks have. doc: of the module; its first line describes the command."""
    assert doc is not None
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--tree", type=Path, action="append", help="a checkout; repeat it to compare several (default: .)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("build"), help="folder on the disk that SQLite writes to")
    return parser


def compare(options: argparse.Namespace, module: str, title: str, measure: Measure) -> int:
    """Measure the trees in turns and print the table. Returns 0. module: of the benchmark, for its command."""
    trees: list[Path] = options.tree or [Path()]
    options.folder.mkdir(exist_ok=True)
    found: dict[str, list[list[float]]] = {}
    for _ in range(options.rounds):
        for number, tree in enumerate(trees):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                corpus = Path(folder).resolve() / "corpus.txt"
                corpus.write_text("text to train on\n" * 1000)
                for figure, value in measure(tree, Path(folder).resolve(), corpus).items():
                    found.setdefault(figure, [[] for _ in trees])[number].append(value)
    sys.stdout.write(_table(f"{title}, {datetime.now(UTC):%Y-%m-%d}", module, trees, found, options.rounds))
    return 0


def _table(title: str, module: str, trees: list[Path], found: dict[str, list[list[float]]], num_rounds: int) -> str:
    """Render the medians over rounds with their least and greatest, and the ratio of the first tree to the last."""
    lines = [
        f"# {title}",
        "",
        f"`python -m {module} {' '.join(sys.argv[1:])}`, {os.cpu_count()} CPU cores, load average {os.getloadavg()[1]:.1f}; "
        f"Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}, each commit is flushed. Medians of {num_rounds} "
        "rounds, least to most.",
        "",
        f"| figure | {' | '.join(str(tree) for tree in trees)} | first to last |",
        f"| --- |{' ---: |' * (len(trees) + 1)}",
    ]
    for name, by_tree in found.items():
        medians = [statistics.median(values) for values in by_tree]
        cells = [f"{middle:.2f} ({min(of):.2f} to {max(of):.2f})" for middle, of in zip(medians, by_tree, strict=True)]
        ratio = f"{medians[0] / medians[-1]:.2f}" if medians[-1] else "–"
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines) + "\n"
