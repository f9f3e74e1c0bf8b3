"""The public names: all there, all found by completion, all explained."""

import inspect
import os
import subprocess
import sys

import memtrain


def test_every_public_name_is_listed_imported_and_explained():
    assert (
        set(dir(memtrain))
        == set(memtrain.__all__)
        == {
            *memtrain._HOME,
            *memtrain._MODULES,
            "__version__",
        }
    )
    for name in memtrain._HOME:
        value = getattr(memtrain, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            words = inspect.getdoc(value) or ""
            assert words and not words.startswith(f"{name}("), name  # what a dataclass says itself


def test_threads_spin_briefly_unless_torch_is_imported_or_the_user_has_chosen():
    for environment, imported, expected in (
        ({}, (), {"GOMP_SPINCOUNT": "1000"}),
        ({}, ("torch",), {}),
        ({"GOMP_SPINCOUNT": "7"}, (), {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, (), {"OMP_WAIT_POLICY": "active"}),
    ):
        memtrain._spin_briefly(environment, imported)
        assert environment == expected


def test_commands_set_the_thread_spinning_before_torch_is_imported():
    code = (
        "import sys, os; os.environ.pop('GOMP_SPINCOUNT', None)\n"
        "from memtrain.cli import main\n"
        "print('torch' in sys.modules, os.environ['GOMP_SPINCOUNT'])"
    )
    unset = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=unset)
    assert done.stdout.split() == ["False", "1000"]
