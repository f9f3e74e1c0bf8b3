"""README says what is so: its commands run, its example runs, its tree is the tree."""

import re
from pathlib import Path
from typing import get_type_hints

import memtrain
from memtrain.cli import COMMANDS
from memtrain.data.prepare import NOT_OPTIONS, prepare_images, prepare_text, prepare_tokens
from memtrain.recipes import RECIPES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs_as_it_stands(tmp_path: Path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
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


def test_every_command_and_recipe_named_exists():
    named = re.findall(r"(?:^ +|`)memtrain ([a-z]+)(?: ([a-z-]+))?", README, re.MULTILINE)
    assert len(named) > 10
    for command, argument in named:
        assert command in COMMANDS, command
        if command == "train" and argument:
            assert argument in RECIPES, argument


def test_the_map_names_every_folder():
    tree = README.split("## Where things are")[1].split("## ")[0]
    package = ROOT / "src/memtrain"
    folders = [path.name for path in package.iterdir() if (path / "__init__.py").exists()]
    assert len(folders) >= 13
    missing = [name for name in folders if f"{name}/" not in tree]
    assert not missing
    for name in re.findall(r"[\w/]+\.py", tree):
        assert (package / name).exists() or (ROOT / name).exists(), name


def test_pictures_named_are_there():
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path


def test_the_options_of_each_kind_of_data_are_those_that_there_are():
    for name, function in (
        ("text", prepare_text),
        ("images", prepare_images),
        ("tokens", prepare_tokens),
    ):
        (row,) = re.findall(rf"^\| {name} \| (.*`held_out`.*) \|$", README, flags=re.MULTILINE)
        assert set(re.findall("`([a-z_]+)`", row)) == get_type_hints(function).keys() - NOT_OPTIONS
