"""The page's files keep their rules without a browser: layers, sizes, colours that all kinds of sight tell apart, policy."""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from octet.service.app import create_app
from octet.service.page import STATIC
from tests.page.stage import stage
from tests.service.conftest import TestClient

MODULES = sorted(STATIC.glob("js/**/*.js"))
MAX_LINES, MAX_COLUMNS = 250, 128
LAYERS = (
    ("views/",),
    ("joblist", "timeline", "logs", "judge", "actions"),
    ("curve", "form", "rows", "chart/"),
    ("schema", "requests", "shell", "measured"),
    ("main", "live", "yaml"),
    ("api", "levels", "stream", "stream-worker"),
    ("figures",),
    ("format", "dom", "theme", "pace"),
)
"""A module imports from its own layer and those below. What is imported while the page runs may come from any."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def name_of(path: Path) -> str:
    return path.relative_to(STATIC / "js").with_suffix("").as_posix()


def layer_of(name: str) -> int:
    (found,) = [
        place
        for place, layer in enumerate(LAYERS)
        if any(name == each or (each[-1] == "/" and name.startswith(each)) for each in layer)
    ]
    return found


def imports(path: Path) -> Iterator[str]:
    for source in re.findall(r'^import .* from "([^"]+)";$', path.read_text(), re.MULTILINE):
        yield name_of(Path(os.path.normpath(path.parent / source)))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_short_and_imports_downwards(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []
    assert [each for each in imports(path) if layer_of(each) < layer_of(name_of(path))] == []


def test_no_import_leads_to_another_host_or_a_package() -> None:
    sources = [each for path in MODULES for each in re.findall(r'(?: from |\bimport\()"([^"\n]+)"', path.read_text())]
    assert sources
    assert [
        each for each in sources if not each.startswith("./") and not each.startswith("../") and each != "octet-types"
    ] == []
    foreign = re.compile(r"https?://(?!www\.w3\.org/2000/svg)")
    assert [path.name for path in STATIC.rglob("*.*") if foreign.search(path.read_text())] == []


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    world = stage(tmp_path_factory.mktemp("stage"))
    with TestClient(create_app(world.settings, database=world.database), base_url="http://127.0.0.1:8000") as client:
        yield client
    world.database.close()


@pytest.mark.parametrize("path", ["/", "/jobs/job_x", "/compare?jobs=a,b", "/comparisons/cmp_x", "/submit", "/cluster"])
def test_each_view_is_the_same_document_under_a_strict_policy(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.text == client.get("/").text
    assert "<script>" not in answer.text


def test_assets_are_kept_for_good_and_only_at_their_version(client: TestClient) -> None:
    (script,) = re.findall(r'src="(/assets/[0-9a-f]{12}/js/main\.js)"', client.get("/").text)
    answer = client.get(script)
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in answer.headers["cache-control"]
    for other in (
        script.replace(script[8:20], "0" * 12),
        script.replace("main.js", "../../../app.py"),
        f"{script[:20]}/index.html",
    ):
        assert client.get(other).status_code == 404


# Machado, Oliveira and Fernandes 2009, severity 1.0, for linear RGB; tritanopia of the same table.
SIGHTS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
LEAST_DISTANCE, LEAST_CONTRAST = 30, 3
Color = tuple[float, float, float]


def tokens() -> dict[str, tuple[Color, Color]]:
    """Read each token's colours, light and dark, in linear RGB."""
    found = re.findall(r"--([\w-]+): light-dark\(#(\w{6}), #(\w{6})\);", (STATIC / "app.css").read_text())
    return {name: (linear(light), linear(dark)) for name, light, dark in found}


def linear(code: str) -> Color:
    red, green, blue = [int(code[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    return decoded(red), decoded(green), decoded(blue)


def decoded(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def lab(color: Color) -> Color:
    """CIE L*a*b* under D65."""
    rows = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
    x, y, z = [sum(a * min(1, max(0, b)) for a, b in zip(row, color, strict=True)) for row in rows]
    fx, fy, fz = [value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x / 0.95047, y, z / 1.08883)]
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def seen(color: Color, sight: str) -> Color:
    red, green, blue = [sum(a * b for a, b in zip(row, color, strict=True)) for row in SIGHTS[sight]]
    return red, green, blue


def contrast(one: Color, other: Color) -> float:
    light, dark = sorted((0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_levels_are_told_apart_by_all_kinds_of_sight(theme: int, sight: str) -> None:
    colors = {name: pair[theme] for name, pair in tokens().items() if name.startswith("level-")}
    assert len(colors) == 6
    seen_colors = {name: lab(seen(color, sight)) for name, color in colors.items()}
    distances = {
        (one, other): sum((a - b) ** 2 for a, b in zip(seen_colors[one], seen_colors[other], strict=True)) ** 0.5
        for one, other in itertools.combinations(colors, 2)
    }
    assert {pair: value for pair, value in distances.items() if value < LEAST_DISTANCE} == {}


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_drawn_colours_stand_out_from_the_surface(theme: int) -> None:
    drawn = ("level-", "evaluation", "memory-weights", "memory-gradients", "memory-exp-avg", "edge")
    found = tokens()
    ratios = {name: contrast(pair[theme], found["surface"][theme]) for name, pair in found.items() if name.startswith(drawn)}
    less = {name: ratio for name, ratio in ratios.items() if ratio < LEAST_CONTRAST and name != "memory-exp-avg-sq"}
    assert less == {}
