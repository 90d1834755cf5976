"""A release builds the images that the compose files and the chart name, and lists what they hold."""

import json
import re
import stat
from pathlib import Path

import pytest
import yaml

from deploy import release
from deploy.images import DOCKERFILE, IMAGES, Engine, EngineError, build_images

ROOT = Path(__file__).parents[2]

# A program with an engine's commands, which writes down how it was called.
RECORDER = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
case "$1 $2" in
  "build --file") test ! -e "$(dirname "$0")/fail" || { echo no space left; exit 125; } ;;
  "image inspect") echo '[{"Id": "sha256:abc", "Size": 7}]' ;;
  "run --rm") echo '{"bomFormat": "CycloneDX"}' ;;
esac
"""


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "engine"
    program.parent.mkdir()
    program.write_text(RECORDER)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def test_the_images_are_those_of_the_compose_files_and_the_chart() -> None:
    built = {image.reference("0.1.0") for image in IMAGES.values()}
    texts = [(ROOT / name).read_text() for name in ("docker-compose.yml", "docker-compose.h100.yml")]
    composed = {name for text in texts for name in re.findall(r"image: (octet/\S+)", text)}
    assert {name.replace("${OCTET_TORCH_LINE:-cu130}", "cu130") for name in composed} <= built
    values = yaml.safe_load((ROOT / "deploy/helm/octet/values.yaml").read_text())
    assert set(values["images"].values()) <= built


def test_each_image_and_its_sbom_have_a_target_and_each_line_of_torch_an_image() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / DOCKERFILE).read_text(), re.MULTILINE))
    assert {name for image in IMAGES.values() for name in (image.target, f"{image.target}-sbom")} <= targets
    lines = {image.arguments["TORCH_LINE"] for image in IMAGES.values() if image.target == "node"}
    assert lines == {path.stem for path in (ROOT / "deploy/docker/torch").glob("*.txt")}


def test_an_image_is_listed_with_its_id_and_an_sbom(recorder: Path, tmp_path: Path) -> None:
    build_images(Engine(str(recorder)), ["control", "node-cuda-cu126"], ROOT, tmp_path, "1.2.0", "c0ffee")
    control, node = json.loads((tmp_path / "octet-fp8-1.2.0-images.json").read_text())
    assert control == {"image": "octet/control:1.2.0", "id": "abc", "bytes": 7, "version": "1.2.0", "revision": "c0ffee"}
    assert node["image"] == "octet/node-cuda:1.2.0-cu126"
    assert json.loads((tmp_path / "octet-node-cuda-cu126-1.2.0-sbom.json").read_text())["bomFormat"] == "CycloneDX"
    calls = (recorder.parent / "calls").read_text()
    assert "--target node --build-arg TORCH_LINE=cu126 --build-arg APT_PACKAGES=gcc libc6-dev" in calls
    assert "image rm octet/control:1.2.0-sbom" in calls


def test_a_failed_build_says_what_the_engine_printed(recorder: Path, tmp_path: Path) -> None:
    (recorder.parent / "fail").touch()
    with pytest.raises(EngineError, match=r"--target control .*status 125:\nno space left"):
        build_images(Engine(str(recorder)), ["control"], ROOT, tmp_path, "1.2.0", "c0ffee")


def test_a_release_without_an_engine_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main(["--out", str(tmp_path / "out"), "--engine", "no-such-engine"]) == 1
    assert "no-such-engine cannot be started" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_an_image_that_is_none_of_a_release_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        release.main(["--out", "build/none", "--images", "control nodes"])
    assert "got nodes; allowed: control node node-cuda-cu126" in capsys.readouterr().err
