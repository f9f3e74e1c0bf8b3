"""Write the code of an exported model."""

from pathlib import Path

from memtrain import __version__
from memtrain.deploy.hugging_face.modeling import CODE_MODULE
from memtrain.deploy.hugging_face.single_file import single_file
from memtrain.files import write_atomic

CODE_FILE = f"{CODE_MODULE}.py"
HEADING = f"""\
A recurrent network as a causal language model of the transformers package.

Copied from memtrain {__version__} (Apache-2.0) by `memtrain export --hf`. It needs torch and
transformers.
"""


def write_code(folder: Path | str) -> None:
    """Write the code that opens a model without memtrain."""
    source = single_file("memtrain.deploy.hugging_face.modeling", HEADING)
    write_atomic(Path(folder) / CODE_FILE, source.encode())
