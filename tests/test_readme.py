"""The README is true: its commands, options and files exist, its example runs, it is short."""

import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import memtrain
from memtrain.cli import COMMANDS
from memtrain.data.prepare import NOT_OPTIONS, prepare_images, prepare_text, prepare_tokens
from memtrain.recipes import RECIPES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs_unchanged(tmp_path: Path, monkeypatch):
    code, _ = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 24
    monkeypatch.chdir(tmp_path)
    from dataclasses import replace

    from memtrain.recipes import recipe

    def quick(name: str) -> memtrain.RunConfig:
        config = recipe(name)
        stages = {
            key: replace(stage, steps=min(2, stage.steps)) for key, stage in config.stages().items()
        }
        return replace(config, **stages)

    monkeypatch.setattr(memtrain, "recipe", quick, raising=False)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert (tmp_path / "runs/elman/config.json").is_file()


def test_the_loop_is_the_example_and_short():
    _, code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    example = (ROOT / "examples/plain_loop.py").read_text().splitlines()
    lines = code.splitlines()  # but for blank lines, which ruff sets in both
    assert [line for line in lines if line] == [line for line in example if line]
    assert len(lines) <= 25


def test_every_command_and_recipe_named_exists():
    named = re.findall(r"(?:^ +|`)memtrain ([a-z]+)(?: ([a-z-]+))?", README, re.MULTILINE)
    assert len(named) > 10
    for command, argument in named:
        assert command in COMMANDS, command
        if command == "train" and argument:
            assert argument in RECIPES, argument


def test_the_readme_is_short():
    assert len(README.splitlines()) < 180


def test_the_file_tree_names_every_folder_and_only_existing_files():
    section = README.split("## Where things are")[1].split("## ")[0]
    assert len(section.strip().splitlines()) <= 25
    package = ROOT / "src/memtrain"
    folders = [path.name for path in package.iterdir() if (path / "__init__.py").exists()]
    assert len(folders) >= 13
    missing = [name for name in folders if f"{name}/" not in section]
    assert not missing
    first = re.search(r"Read first, in this\s+order: (.*?)\.\s", section, flags=re.DOTALL)
    assert first and len(re.findall(r"`([\w/]+\.py)`", first[1])) == 6
    for name in re.findall(r"`([\w/]+\.py)`", section):
        assert (package / name).exists() or (ROOT / name).exists(), name


def test_the_call_path_to_a_training_step_is_as_described():
    way = re.search(r"A training step is reached by\s+(.*?)\.\n", README, flags=re.DOTALL)
    assert way
    names = re.findall(r"`([^`]+)`", way[1])
    assert names == [
        "cli/train.py",
        "Run.train",
        "training/stages.py",
        "training/loop.py",
        "training/step.py",
        "objectives/smt.py",
    ]
    assert hasattr(memtrain.Run, "train")


DOCS = [*(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/README.md"]
DOCS += [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "README.md")]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_docs_are_wrapped(path: Path):
    text = re.sub(r"```.*?\n```", "", path.read_text(), flags=re.DOTALL)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    ", "#", "!["))]
    assert max(map(len, prose)) <= 100


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_files_named_in_docs_exist(path: Path):
    text = path.read_text()
    history = path.name == "LOG.md"  # names modules as they were
    for name in [] if history else re.findall(r"(?<![\w/])((?:\w+/)+\w+\.py)\b", text):
        assert (ROOT / name).exists() or (ROOT / "src/memtrain" / name).exists(), name
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (path.parent / link).exists(), link


def test_options_named_in_docs_exist():
    """Every --option of the README is known to a command or is a field of a config."""
    known = {"--" + name.replace("_", "-") for name in _fields(memtrain.RunConfig)}
    source = "\n".join(path.read_text() for path in (ROOT / "src/memtrain/cli").glob("*.py"))
    for option in set(re.findall(r"(?<![\w-])--[a-z][\w.-]*[a-z0-9]", README)):
        name = option.removeprefix("--").replace("-", "_")
        stated = re.search(rf"\b{name}\b|{option}\b", source)
        assert option in known or stated or option == "--nproc-per-node", option


def _fields(config: type, prefix: str = "") -> set[str]:
    names = set()
    for name, kind in get_type_hints(config).items():
        kinds = [kind, *get_args(kind)]
        names |= {prefix + name}
        for one in kinds:
            if is_dataclass(one) and isinstance(one, type):
                names |= _fields(one, f"{prefix}{name}.")
    return names


def test_linked_images_exist():
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize(
    ("heading", "function"),
    [
        ("### Options of text", prepare_text),
        ("### Options of tokens", prepare_tokens),
        ("### Options", prepare_images),
    ],
)
def test_the_documented_options_of_each_kind_of_data_are_complete(heading: str, function):
    section = (ROOT / "docs/DATA.md").read_text().split(f"\n{heading}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", section, flags=re.MULTILINE)
    documented = set(re.findall("[a-z_]+", " ".join(rows)))
    assert documented == get_type_hints(function).keys() - NOT_OPTIONS
