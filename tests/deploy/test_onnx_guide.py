"""The guide of exported steps: what its program decodes is what memtrain decodes."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs/guides/onnx.md"
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_digit_without_memtrain_is_a_picture():
    """The decoding that the guide writes out is that of the codec."""
    import numpy as np

    from memtrain.generation.pretrained import load_pretrained

    codec = load_pretrained("mnist-small").spelling
    assert codec is not None
    tokens = np.random.default_rng(0).integers(256, size=196)
    (program,) = (one for one in PROGRAM.findall(GUIDE.read_text()) if "for line in image" in one)
    decoding = program[program.index("image = ") : program.index("for line in image")]
    found = dict(np=np, size=28, levels=4, patch=2, tokens=tokens)
    exec(decoding, found)
    grey = np.asarray(found["image"]) * 85
    assert np.array_equal(grey, codec.decode_images(tokens[None])[0])
