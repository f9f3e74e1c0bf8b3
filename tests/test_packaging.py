"""The wheel and the sdist: their content, and the commands of an installed wheel elsewhere."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = {
    "memtrain/py.typed",
    "memtrain/plotting/page.css",
    "memtrain/deploy/browser/network.js",
    "memtrain/deploy/browser/page.css",
    "memtrain/deploy/browser/memory.html",
    "memtrain/generation/weights/mnist-small.safetensors",
    "memtrain/generation/weights/mnist-small.json",
    "memtrain/data/labels.py",
}
FOLDERS = ("tests", "docs", "scripts", "benchmarks", "examples")
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # a build replaces sys.argv
print(build_meta.build_sdist(out), build_meta.build_wheel(out))
"""
"""The calls of `python -m build`, without a download of setuptools into a separate environment."""


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    """Run a command without the repository on its path; returns what it printed."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=kept | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist and the wheel, built from a copy of the repository's files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    names = run("git", "ls-files", "-co", "--exclude-standard", folder=ROOT).splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-c", BUILD, out, folder=source)
    return {path.suffix: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def installed(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts' folder of a new environment with the wheel; it sees our dependencies."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    target = ["install", "--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    python = folder / "bin" / "python"
    run(python, "-m", "pip", *target, archives[".whl"], folder=folder)
    return folder / "bin"


def test_the_wheel_holds_the_package_and_its_data_alone(archives: dict[str, Path]):
    with zipfile.ZipFile(archives[".whl"]) as wheel:
        names = wheel.namelist()
    assert {*names} >= NEEDED
    assert {name.split("/")[0].split("-")[0] for name in names} == {"memtrain"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    package = {
        f"memtrain/{path.relative_to(ROOT / 'src/memtrain')}"
        for path in (ROOT / "src/memtrain").rglob("*.py")
    }
    assert package == {name for name in names if name.endswith(".py")}


def test_the_sdist_holds_no_tests_and_no_docs(archives: dict[str, Path]):
    with tarfile.open(archives[".gz"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= {f"src/{name}" for name in NEEDED} | {"LICENSE", "README.md", "pyproject.toml"}
    assert not [name for name in names if name.split("/")[0] in FOLDERS]


def test_extras_are_those_that_code_uses():
    """The source imports an extra's packages, and messages name extras that exist.

    But for `cells`, whose classes are named by --cell.kind, as in tests/models/test_wrap.py, and
    `docs`, whose packages docs/conf.py names, or Sphinx runs.
    """
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    wrapped = (ROOT / "tests/models/test_wrap.py").read_text()
    extras = PROJECT["optional-dependencies"]
    for name, requirements in extras.items():
        for requirement in requirements if name not in ("dev", "docs") else ():
            package = re.split(r"[<>=]", requirement)[0]
            statement = rf"^\s*(import|from) (torch\.utils\.)?{package}\b"
            called = rf"""import_module\("{package}"\)|_PACKAGES = .*"{package}\""""
            imported = re.search(f"{statement}|{called}", source, re.MULTILINE)
            if name == "cells":
                assert not imported and re.search(rf'"{package}[.\w]*:\w+"', wrapped), package
            else:
                assert imported, package
    assert {*re.findall(r"pip install memtrain\[(\w+)\]", source)} <= extras.keys()


def test_an_installed_wheel_runs_in_an_empty_folder(installed: Path, tmp_path: Path):
    memtrain = installed / "memtrain"
    place = "import memtrain; print(memtrain.__file__)"
    found = run(installed / "python", "-c", place, folder=tmp_path)
    assert found.startswith(str(installed.parent))
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", run(memtrain, "--version", folder=tmp_path).strip())
    assert "usage: memtrain demo" in run(memtrain, "demo", "--help", folder=tmp_path)
    assert not [*tmp_path.iterdir()]
    run(memtrain, "generate", "mnist-small", "--count", "1", folder=tmp_path, OMP_NUM_THREADS="1")
    assert [path.name for path in tmp_path.glob("mnist-small/*.png")] == ["1-seed0.png"]


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo(installed: Path, tmp_path: Path):
    shown = run(installed / "memtrain", "demo", "--length", "8", folder=tmp_path)
    assert "RNN, SMT → DMT" in shown
    assert [path for path in tmp_path.rglob("index.html")]
