"""The wheel holds every module of the folders below the one name `octet`, and works beside files of anybody's names.

A lost link in octet/ gives a wheel that is nearly empty and an exit status of 0, so its modules are compared with the folders.
"""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("api_schemas", "client", "service", "worker")
PYTHONS = ("3.11", "3.12", "3.13")
WITHOUT_EXTRAS = {
    ("serve",): "pip install 'octet-fp8[service,worker]'",
    ("demo",): "pip install 'octet-fp8[service,worker]'",
    ("export", "checkpoint", "--out", "model"): "pip install 'octet-fp8[worker]'",
    ("data", "tokenize", "text", "--tokenizer", "t", "--out", "o"): "pip install 'octet-fp8[worker,models]'",
}
"""Commands that need an extra, and how to install it."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of a copy, since setuptools leaves its folders beside the source."""
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    no_caches = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("octet", *PACKAGES):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=no_caches)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", wheels, source], check=True, cwd=wheels)
    (built,) = wheels.glob("*.whl")
    return built


def test_each_link_is_a_folder_of_the_checkout() -> None:
    for name in PACKAGES:
        link = ROOT / "octet" / name
        assert link.is_symlink(), f"octet/{name} is no link; git needs core.symlinks=true"
        assert str(link.readlink()) == f"../{name}"


@pytest.mark.system
def test_the_wheel_has_every_module_below_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    own = {
        f"octet/{path.relative_to(ROOT / 'octet')}"
        for path in [*(ROOT / "octet").glob("*.py"), *(ROOT / "octet/compat").rglob("*.py")]
    }
    modules = own | {
        f"octet/{path.relative_to(ROOT)}"
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        if (path.parent / "__init__.py").exists() or "migrations" in path.parts
    }
    assert wheel.name.startswith("octet_fp8-")
    assert {name for name in files if name.endswith(".py")} == modules
    assert {name.partition("/")[0] for name in files} == {"octet"}


def test_the_wheel_has_the_page(wheel: Path) -> None:
    static = ROOT / "service" / "page" / "static"
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if name.startswith("octet/service/page/static/")}
        sent = {path: archive.read(f"octet/service/page/static/{path}") for path in ("index.html", "js/chart/line.js")}
    assert files == {f"octet/service/page/static/{path.relative_to(static)}" for path in static.rglob("*.*")}
    assert all(content == (static / path).read_bytes() for path, content in sent.items())


@pytest.mark.parametrize("name", PACKAGES)
def test_a_bare_name_is_refused(name: str) -> None:
    """A second import of the same file would make each class twice."""
    found = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == f"ImportError: import octet.{name}, not {name}"


@pytest.fixture(scope="module", params=PYTHONS)
def environment(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the bare wheel into an empty environment; gives its folder of programs."""
    folder = tmp_path_factory.mktemp(f"python{request.param}")
    subprocess.run([interpreter(request.param), "-m", "venv", folder], check=True)
    install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--constraint", ROOT / "constraints.txt", wheel], check=True)
    yield folder / "bin"
    shutil.rmtree(folder)


@pytest.mark.system
class TestInAnEmptyEnvironment:
    def test_it_imports_beside_hostile_files(self, environment: Path, tmp_path: Path) -> None:
        for name in (*PACKAGES, "octet_notes"):
            (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
        (tmp_path / "script.py").write_text("from octet import Client\nprint(Client.__module__)\n")
        assert run(environment / "python", "script.py", cwd=tmp_path).stdout == "octet.client.api\n"

    def test_the_command_works_without_extras(self, environment: Path, tmp_path: Path) -> None:
        version = run(environment / "octet", "--version", cwd=tmp_path).stdout
        assert version.startswith("octet ")
        assert "submit" in run(environment / "octet", "--help", cwd=tmp_path).stdout

    def test_the_library_says_in_one_sentence_what_it_needs(self, environment: Path, tmp_path: Path) -> None:
        found = run(environment / "python", "-c", "from octet import initialize", cwd=tmp_path, status=1)
        expected = "octet.initialize needs torch; install it with: pip install 'octet-fp8[worker]'"
        assert found.stderr.splitlines()[-1] == f"ModuleNotFoundError: {expected}"

    @pytest.mark.parametrize("command", WITHOUT_EXTRAS, ids=" ".join)
    def test_a_command_says_in_one_sentence_what_it_needs(
        self, environment: Path, tmp_path: Path, command: tuple[str, ...]
    ) -> None:
        found = run(environment / "octet", *command, cwd=tmp_path, status=2)
        assert WITHOUT_EXTRAS[command] in found.stderr
        assert "Traceback" not in found.stderr


@pytest.mark.matrix
def test_the_service_runs_without_torch_on_the_newest_python(wheel: Path, tmp_path: Path) -> None:
    """The control plane's processes load in an environment of the extra alone, and say what they miss in one sentence."""
    programs = tmp_path / "environment" / "bin"
    subprocess.run([interpreter(PYTHONS[-1]), "-m", "venv", programs.parent], check=True)
    install = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--constraint", ROOT / "constraints.txt", f"{wheel}[service]"], check=True)
    loaded = "import sys, octet.service.app, octet.service.processes.api; print('torch' in sys.modules)"
    assert run(programs / "python", "-c", loaded, cwd=tmp_path).stdout == "False\n"
    assert "octet-fp8[service,worker]" in run(programs / "octet", "serve", cwd=tmp_path, status=2).stderr
    refused = run(programs / "octet", "api", cwd=tmp_path, status=2).stderr
    assert "Traceback" not in refused
    assert "database" in refused


def run(program: Path, *arguments: str, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment with nothing of this checkout in sight."""
    found = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, cwd=cwd, env={"COLUMNS": "200"})
    assert found.returncode == status, found.stdout + found.stderr
    return found


def interpreter(version: str) -> str:
    """Find a Python of that version that starts, among those on PATH and pyenv's."""
    name = f"python{version}"
    candidates = [shutil.which(name), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))]
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    pytest.skip(f"missing: {name}, on PATH or among pyenv's versions")
