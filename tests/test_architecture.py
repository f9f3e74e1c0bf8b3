"""The layout of the package: imports go one way, and a name means one thing within a room."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import memtrain

PACKAGE = Path(memtrain.__file__).parent
LAYERS = (
    ("__main__",),
    ("cli",),
    ("demo",),
    ("paper", "bench", "deploy"),
    ("generation",),
    ("training",),
    ("plotting",),
    ("runs",),
    ("accel",),
    ("evaluation",),
    ("objectives",),
    ("models",),
    ("data",),
    ("recipes",),
    ("config",),
    ("files",),
    ("losses",),
    ("shapes",),
    ("errors",),
    ("",),  # memtrain itself: its version
)
"""Rooms from the top down. A module imports from its own room and from rooms below it."""
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    """The rooms of memtrain that a module imports from, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "memtrain":
                first = rest.split(".")[0]
                yield first if first in RANK else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path):
    here = room(path)
    for other in imported_rooms(path):
        assert other == here or RANK[other] > RANK[here], f"{here} imports {other}"


def test_at_most_six_modules_are_at_the_top_level():
    assert len(list(PACKAGE.glob("*.py"))) <= 6


def test_every_folder_has_a_rank():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= RANK.keys()


@pytest.mark.parametrize("name", [name for rooms in LAYERS for name in rooms if name])
def test_no_public_name_is_defined_twice_in_a_room(name: str):
    """But for figures, each of which exports FIGURE, and what is imported from another module."""
    counts: Counter[str] = Counter()
    for path in MODULES:
        if room(path) == name and path.parent.name != "figures":
            for node in ast.parse(path.read_text()).body:
                counts.update(n for n in defined(node) if not n.startswith("_"))
    assert not {found for found, count in counts.items() if count > 1}


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement at the top level of a module defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        overload = [d for d in node.decorator_list if ast.unparse(d).endswith("overload")]
        return [] if overload else [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def test_help_and_configs_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import memtrain, memtrain.config, memtrain.recipes, memtrain.paper\n"
        "from memtrain.cli import main\n"
        "sys.exit(main(['--help']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
