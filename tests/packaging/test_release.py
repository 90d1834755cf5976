"""A release has all its files, made of what git has at HEAD, and is refused from a repository that is not in order."""

import hashlib
import json
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from deploy import release

ROOT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## Unreleased\n\n- next\n\n## 1.2.0 - 2026-11-24\n\n- this\n- that\n\n## 1.1.0\n\n- before\n"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two files, tagged v1.2.0."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "pyproject.toml").write_text('[project]\nname = "octet-fp8"\nversion = "1.2.0"\n')
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    for command in (["init"], ["add", "."], ["commit", "-m", "First"], ["tag", "v1.2.0"]):
        names = ["-c", "user.name=tester", "-c", "user.email=tester@example.com"]
        subprocess.run(["git", "-C", folder, *names, *command], check=True, capture_output=True)
    monkeypatch.setattr(release, "ROOT", folder)
    return folder


def test_the_changes_of_a_version_are_its_section() -> None:
    assert release.section(CHANGELOG, "1.2.0") == "- this\n- that\n"
    assert release.section(CHANGELOG, "Unreleased") == "- next\n"
    with pytest.raises(release.Refused, match=r'no changes under "## 1\.3\.0"'):
        release.section(CHANGELOG, "1.3.0")


def test_the_tag_at_head_of_a_clean_checkout_is_taken(repository: Path) -> None:
    release.check_tag("v1.2.0", "1.2.0")


def test_another_tag_than_the_version_is_refused(repository: Path) -> None:
    with pytest.raises(release.Refused, match=r"version 1\.2\.0; allowed: v1\.2\.0"):
        release.check_tag("v1.3.0", "1.2.0")


def test_a_tag_that_is_not_there_is_refused(repository: Path) -> None:
    subprocess.run(["git", "-C", repository, "tag", "-d", "v1.2.0"], check=True, capture_output=True)
    with pytest.raises(release.Refused, match=r"HEAD is not v1\.2\.0"):
        release.check_tag("v1.2.0", "1.2.0")


def test_changed_files_are_refused(repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text("other")
    with pytest.raises(release.Refused, match=r"CHANGELOG\.md"):
        release.check_tag("v1.2.0", "1.2.0")


def test_a_folder_with_files_is_refused_in_one_sentence(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["--out", str(repository)]) == 1
    assert "is not empty" in capsys.readouterr().err


def test_the_context_of_the_images_has_what_their_dockerfile_copies() -> None:
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE) for word in line.split()}
    held = [Path(name) for name in release.OF_IMAGES]
    assert copied
    assert [name for name in copied if not any(Path(name).is_relative_to(path) for path in held)] == []


@pytest.mark.system
def test_the_files_of_a_release(tmp_path: Path) -> None:
    """Make all but the larger SBOMs, from HEAD; the wheel's command has run in an environment of its own."""
    assert release.main(["--out", str(tmp_path / "out"), "--sbom", "", "--images", ""]) == 0
    (wheel,) = tmp_path.glob("out/octet_fp8-*.whl")
    version = wheel.name.split("-")[1]
    files = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert {
        f"octet-fp8-{version}-changes.md",
        f"octet-fp8-{version}-image-context.tar.gz",
        f"octet-fp8-{version}-sbom.json",
        f"octet_fp8-{version}.tar.gz",
        f"octet-{version}.tgz",
        "SHA256SUMS",
    } <= files.keys()
    sums = dict(line.split("  ")[::-1] for line in files["SHA256SUMS"].read_text().splitlines())
    assert sums == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if name != "SHA256SUMS"}
    components = json.loads(files[f"octet-fp8-{version}-sbom.json"].read_text())["components"]
    assert {"octet-fp8", "httpx", "pydantic"} <= {component["name"] for component in components}
    assert "torch" not in {component["name"] for component in components}
    with zipfile.ZipFile(wheel) as archive:
        assert "octet/worker/rank/main.py" in archive.namelist()
    with tarfile.open(files[f"octet-fp8-{version}-image-context.tar.gz"]) as archive:
        assert {"deploy/docker/Dockerfile", "constraints.txt", ".dockerignore", "octet/worker"} <= set(archive.getnames())
