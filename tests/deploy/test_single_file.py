"""The copied code stands alone, and is the package's own."""

import ast
import inspect
import sys

from memtrain.deploy.hugging_face import modeling
from memtrain.deploy.hugging_face.single_file import single_file
from memtrain.models.cells import GRUCell
from memtrain.models.layers import Rotary

SOURCE = single_file("memtrain.deploy.hugging_face.modeling", "The heading.")
NODES = list(ast.walk(ast.parse(SOURCE)))


def test_it_imports_neither_memtrain_nor_optional_packages():
    modules = {node.module for node in NODES if isinstance(node, ast.ImportFrom)}
    modules |= {one.name for node in NODES if isinstance(node, ast.Import) for one in node.names}
    packages = {str(module).split(".")[0] for module in modules}
    assert {"torch", "transformers"} <= packages
    assert packages <= {"torch", "transformers", *sys.stdlib_module_names}


def test_definitions_are_copied_as_they_are():
    for definition in (GRUCell, Rotary, modeling.MemtrainForCausalLM):
        assert inspect.getsource(definition) in SOURCE
    assert ast.get_docstring(ast.parse(SOURCE)) == "The heading."


def test_what_the_network_does_not_need_is_left_out():
    defined = {node.name for node in NODES if isinstance(node, ast.ClassDef)}
    assert {"TransformerCell", "Decoder", "CellConfig", "MemtrainConfig"} <= defined
    assert not defined & {"Teacher", "AttentionCell", "WrappedCell", "RunConfig"}
    names = [node.name for node in ast.parse(SOURCE).body if isinstance(node, ast.ClassDef)]
    assert len(names) == len(set(names))
