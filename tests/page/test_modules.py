"""The pure modules compute what Python computes: numbers in words, YAML, scales, decimation, smoothing, parsing of streams."""

import json
import random
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from octet.client.job_file import load_job_file
from octet.client.text import duration, num_bytes, number
from tests.page.conftest import Site, ready

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(chromium: "Browser", empty_site: Site) -> Iterator[Call]:
    """Call a function of a module: its module, its name, its arguments."""
    page = ready(chromium.new_page(), f"{empty_site.url}/")
    assets = page.locator("link[rel=stylesheet]").get_attribute("href").rpartition("/")[0]  # type: ignore[union-attr]

    def of_module(module: str, name: str, *arguments: Any) -> Any:
        program = "async ([path, name, given]) => { const found = (await import(path))[name]; return found(...given); }"
        return page.evaluate(program, [f"{assets}/js/{module}.js", name, list(arguments)])

    yield of_module
    page.close()


def test_numbers_are_written_as_on_a_terminal(call: Call) -> None:
    draw = random.Random(1)
    for value in (0, 5.5249, 59.9, 60, 61.2, 3599.6, 86399, *[10 ** draw.uniform(-2, 4.9) for _ in range(40)]):
        assert call("format", "duration", value) == duration(value)
        assert call("format", "number", value) == number(value)
    for size in (0, 999, 1000, 999_500, 5_324_800, *[int(10 ** draw.uniform(0, 15)) for _ in range(40)]):
        ours, theirs = call("figures", "bytes", size), num_bytes(size)
        assert (float(ours.split()[0]), ours.split()[1]) == (float(theirs.split()[0]), theirs.split()[1])
    assert call("format", "number", None) == number(None)


def test_moments_are_as_short_as_they_can_be(call: Call) -> None:
    """A moment of today has no date, and one of this year no year. None has a word that a narrow column would break."""
    now = datetime.now()
    noon = now.replace(month=now.month % 12 + 1, day=15, hour=12, minute=5, second=7)
    shown = [call("figures", "clock", at.astimezone().isoformat()) for at in (now, noon, datetime(2019, 12, 31, 23, 59, 59))]
    assert shown[0] in {f"{now:%H:%M:%S}", f"{now:%b} {now.day} {now:%H:%M:%S}"}  # midnight may have passed meanwhile
    assert shown[1:] == [f"{noon:%b} 15 12:05:07", "Dec 31, 2019 23:59:59"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_job_files_are_read_as_the_command_reads_them(call: Call, path: Path) -> None:
    known = load_job_file(str(path))
    read = call("yaml", "fromYaml", path.read_text())
    assert read == known
    assert call("yaml", "fromYaml", call("yaml", "toYaml", known)) == known


@pytest.mark.parametrize(
    "document",
    [
        {"name": "on", "level": "02", "date": "2026-01-31", "empty": "", "colon": "a: b", "hash": "a #b", "quote": 'say "x"'},
        {"list": [1, -2.5, 3e-4, None, True, "true", "null", "~"], "nested": {"a": {"b": {"c": [{"d": 1}]}}}},
        {"text": "two\nlines", "unicode": "schön ☀", "dash": "- x", "brace": "{a}", "star": "*", "globs": ["**/*.txt", "!x"]},
        {"empty": {}, "none": [], "number-like": "1e5", "key with: colon": 1, "__proto__": {"x": 1}},
    ],
)
def test_yaml_that_is_written_is_the_same_when_python_reads_it(call: Call, document: dict[str, Any], tmp_path: Path) -> None:
    written = call("yaml", "toYaml", document) if "__proto__" not in document else None
    if written is not None:
        (tmp_path / "job.yaml").write_text(written)
        assert load_job_file(str(tmp_path / "job.yaml")) == document
    read = call("yaml", "fromYaml", json.dumps(document))
    assert json.loads(json.dumps(read)) == {key: value for key, value in document.items() if key != "__proto__" or key in read}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n  b: 2\n", "line 2: indented more"),
        ("a: 1\na: 2\n", "line 2: a is given twice"),
        ("a: &x 1\n", "line 1: & has a meaning"),
        ("a: {b: 1\n", "line 1: a bracket is not closed"),
        ("a: |\n  text\n", "line 1: | has a meaning"),
        ("\ta: 1\n", "line 1: indented by a tab"),
        ("just words\n", "line 1: expected name: value"),
        ('a: "x\n', "line 1: a quote is not closed"),
    ],
)
def test_other_yaml_is_refused_at_its_line(call: Call, text: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        call("yaml", "fromYaml", text)


def test_a_spike_of_one_step_is_never_left_out(call: Call) -> None:
    x, y = list(range(1, 100_001)), [2.0] * 100_000
    y[77_776] = 61.4
    line = call("chart/decimate", "decimate", x, y, 1, 100_000, 800)
    assert len(line) < 4 * 800
    assert [77_777, 61.4] in line


def test_smoothing_keeps_constants_and_lines(call: Call) -> None:
    weights = [1] * 50
    constant = call("chart/smooth", "smooth", [3.5] * 50, weights, 10)
    assert constant == pytest.approx([3.5] * 50)
    falling = [5 - 0.1 * step for step in range(50)]
    assert call("chart/smooth", "smooth", falling, weights, 10) == pytest.approx(falling)
    with_gap = call("chart/smooth", "smooth", [1.0, None, 1.0], [1, 1, 1], 5)
    assert with_gap == [pytest.approx(1), None, pytest.approx(1)]


def test_ticks_are_round_and_inside(call: Call) -> None:
    assert call("chart/scale", "linearTicks", 0, 200, 4) == [0, 50, 100, 150, 200]
    assert call("chart/scale", "linearTicks", 1.9, 5.6, 5) == [2, 3, 4, 5]
    assert call("chart/scale", "linearTicks", 3, 3, 5) == [3]


def test_messages_of_a_stream_are_parsed(call: Call) -> None:
    text = 'id: event.job_x.4\nevent: event\ndata: {"job_id":"job_x","data":[{"seq":4}]}'
    assert call("stream", "parse", text) == {"kind": "event", "id": "event.job_x.4", "job": "job_x", "data": [{"seq": 4}]}
    assert call("stream", "parse", ": still here") is None


def test_a_chart_keeps_its_lines_while_their_curve_grows(chromium: "Browser", empty_site: Site) -> None:
    """A window may be resized between a step's arrival and its drawing; the axis was 0 to 1 then, and the lines gone."""
    page = ready(chromium.new_page(), f"{empty_site.url}/")
    main = page.locator("script[type=module]").get_attribute("src")
    drawn = page.evaluate(
        """async (main) => {
          const { LineChart } = await import(main.replace("main.js", "chart/line.js"));
          const chart = new LineChart({ label: "Loss", xLabel: "step", signal: new AbortController().signal });
          document.body.append(chart.element);
          const frame = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
          const x = [1, 2, 3];
          chart.set([{ name: "training", color: "--text", x, y: [5, 4, 3] }]);
          await frame();
          x.push(4);
          chart.draw();
          await frame();
          return [chart.y.least, chart.y.most, chart.canvas.getAttribute("aria-label")];
        }""",
        main,
    )
    page.close()
    assert drawn == [pytest.approx(2.88), pytest.approx(5.12), "Loss. At step 3: training 3"]
