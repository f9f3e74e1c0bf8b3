"""Write a module of memtrain and everything that it uses of memtrain as one source file.

transformers copies the code of a model into its own cache, where memtrain may be missing. So the
definitions are copied as they stand, from the modules that the package itself runs.
"""

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "memtrain"
SHAPES = '''\
class Shaped:
    """Stands for a type of jaxtyping: `Shaped[Tensor, "B T"]` documents a shape, and is Tensor."""

    def __class_getitem__(cls, item):
        return item[0]
'''


@dataclass
class Source:
    """The top level of one module."""

    name: str
    lines: list[str]
    definitions: dict[str, list[ast.stmt]]
    """The statements of each name; of an assignment, its docstring too."""
    imports: dict[str, tuple[str, str]]
    """The module and the name in it of each imported name; the name is "" if it is a module."""
    needed: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, name: str) -> "Source":
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None, name
        text = Path(spec.origin).read_text(encoding="utf-8")
        definitions: dict[str, list[ast.stmt]] = {}
        imports: dict[str, tuple[str, str]] = {}
        last = ""
        for node in ast.parse(text).body:
            match node:
                case ast.ImportFrom(module=str(module), names=names):
                    imports |= {one.asname or one.name: (module, one.name) for one in names}
                case ast.Import(names=names):
                    imports |= {one.asname or one.name: (one.name, "") for one in names}
                case ast.FunctionDef(name=last) | ast.ClassDef(name=last):
                    definitions[last] = [node]
                case (
                    ast.Assign(targets=[ast.Name(id=last)])
                    | ast.AnnAssign(target=ast.Name(id=last))
                ):
                    definitions[last] = [node]
                case ast.Expr(value=ast.Constant()) if last:
                    definitions[last].append(node)
                    last = ""
                case ast.Expr(value=ast.Constant()):  # the module's docstring
                    pass
                case _:
                    raise AssertionError(f"{name}: line {node.lineno} defines no single name")
        return cls(name, text.splitlines(), definitions, imports)

    def used_by(self, name: str) -> set[str]:
        """The names of this module's top level that a definition uses."""
        known = self.definitions.keys() | self.imports.keys()
        nodes = (node for one in self.definitions[name] for node in ast.walk(one))
        return {node.id for node in nodes if isinstance(node, ast.Name)} & known

    def text(self) -> str:
        """The needed definitions, in their order, with the comments above them."""
        parts = []
        for name, nodes in self.definitions.items():
            if name in self.needed:
                decorators = getattr(nodes[0], "decorator_list", [])
                first = min(node.lineno for node in (nodes[0], *decorators)) - 1
                while self.lines[first - 1].startswith("#"):
                    first -= 1
                parts.append("\n".join(self.lines[first : nodes[-1].end_lineno]))
        return "\n\n\n".join(parts)


def single_file(module: str, heading: str) -> str:
    """The source of `module` after all definitions of memtrain that it needs.

    Args:
        module: its full name.
        heading: the docstring of the file.
    """
    sources: dict[str, Source] = {}
    after: dict[str, set[str]] = {}
    outside: dict[str, tuple[str, str]] = {}
    shapes: set[str] = set()

    def need(where: str, name: str) -> None:
        source = sources.get(where) or sources.setdefault(where, Source.read(where))
        before = after.setdefault(where, set())
        if name in source.definitions:
            if name not in source.needed:
                source.needed.add(name)
                for used in sorted(source.used_by(name)):
                    need(where, used)
            return
        home, original = source.imports[name]
        if home.split(".")[0] == PACKAGE:
            assert original == name, f"{where}: imports {original} under another name"
            before.add(home)
            need(home, name)
        elif home == "jaxtyping":
            shapes.add(name)
        else:
            assert outside.setdefault(name, (home, original)) == (home, original), name

    for name in Source.read(module).definitions:
        need(module, name)
    found = [name for source in sources.values() for name in source.needed]
    assert len(found) == len(set(found)), f"{module}: two modules define the same name"
    aliases = "".join(f"{name} = Shaped\n" for name in sorted(shapes))
    parts = [f'"""{heading}"""\n', _imports(outside), f"\n{SHAPES}\n\n{aliases}"]
    for where in TopologicalSorter(after).static_order():
        if sources[where].needed:  # not so the __init__ that passes a name on
            parts.append(f"\n# {f' {where} ':-^96}\n\n\n{sources[where].text()}\n")
    return "\n".join(parts)


def _imports(names: dict[str, tuple[str, str]]) -> str:
    """Import statements of names, one per module."""
    whole, members = [], defaultdict(list)
    for name, (module, original) in sorted(names.items()):
        if original:
            members[module].append(original if name == original else f"{original} as {name}")
        else:
            whole.append(f"import {module}" if name == module else f"import {module} as {name}")
    lines = [f"from {module} import {', '.join(found)}" for module, found in members.items()]
    return "\n".join(whole + sorted(lines)) + "\n"
