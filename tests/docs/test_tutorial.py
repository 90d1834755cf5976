"""The tutorial's example and its notebook run, with few steps: what they compare, what they say, and when they refuse."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.kit.waiting import LONG_S

FOLDER = ROOT / "examples/is_o2_safe"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module; its text is drawn from two small files."""
    spec = importlib.util.spec_from_file_location("compare", FOLDER / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.system
def test_the_command_ends_with_a_verdict(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["compare.py", "--level", "O2", "--seeds", "2", "--steps", "2"])
    compare.main()
    *seeds, gap, held, noise, answer = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in seeds] == ["seed 0", "seed 1"]
    assert gap.startswith("gap of O2 to fp32: ")
    assert held.startswith("bytes per parameter: fp32 16.00, O2 7.5")
    assert noise.endswith("dB signal to noise")
    assert answer.partition(":")[0] in ("safe", "not safe", "open")


def test_one_seed_is_refused(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["compare.py", "--seeds", "1"])
    with pytest.raises(SystemExit, match="2"):
        compare.main()


@pytest.mark.parametrize(("losses", "answer"), [((1.001, 1.002), "safe"), ((1.05, 1.051), "not safe"), ((1.0, 1.03), "open")])
def test_the_verdict_needs_the_whole_interval(compare: ModuleType, losses: tuple[float, ...], answer: str) -> None:
    pairs = [(compare.Result(1.0, 16.0, None), compare.Result(loss, 6.1, 25.0)) for loss in losses]
    assert compare.verdict("O2", pairs, tolerance=0.02).splitlines()[-1].startswith(f"{answer}: ")


def test_the_page_shows_the_example(compare: ModuleType) -> None:
    code = (FOLDER / "compare.py").read_text()
    shown = blocks("docs/tutorial.md", "python")
    assert shown
    for block in shown:
        assert block in code, f"docs/tutorial.md shows what the example does not have:\n{block}"


def notebook() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / "is_o2_safe.ipynb").read_text())
    return document


def test_the_notebook_is_committed_without_results() -> None:
    assert not [cell for cell in notebook()["cells"] if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.system
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Run every cell in a kernel of its own, with two seeds and two steps in the place of the cell that sets them."""
    import nbformat
    from nbclient import NotebookClient

    document = nbformat.from_dict(notebook())
    (setting,) = [cell for cell in document.cells if "SEEDS, STEPS = 3, 300" in cell.source]
    setting.source = setting.source.replace("SEEDS, STEPS = 3, 300", "SEEDS, STEPS = 2, 2")
    client = NotebookClient(document, timeout=LONG_S, resources={"metadata": {"path": str(FOLDER)}})
    client.execute(env=kernel_environment(tmp_path))
    said = "".join(output.get("text", "") for cell in document.cells for output in cell.get("outputs", []))
    assert "8 layers converted, 1 skipped" in said
    assert "gap of O2 to fp32: " in said


def kernel_environment(folder: Path) -> dict[str, str]:
    """Let the kernel write into this test's folder, and import this checkout."""
    import os

    return os.environ | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder)}
