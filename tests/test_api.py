"""The public names: all there, all found by completion, all explained."""

import inspect

import memtrain


def test_every_public_name_is_listed_imported_and_explained():
    assert set(dir(memtrain)) == set(memtrain.__all__) == {*memtrain._HOME, "__version__"}
    for name in memtrain._HOME:
        value = getattr(memtrain, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            words = inspect.getdoc(value) or ""
            assert words and not words.startswith(f"{name}("), name  # what a dataclass says itself
