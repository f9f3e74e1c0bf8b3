"""The page's network in JavaScript gives torch's logits; its sampler and vocabulary are ours."""

import numpy as np
import pytest
import torch
from browser_testing import (
    needs_node,
    packed_json,
    perturbed_model,
    random_tokens_of,
    run_node,
)

from memtrain.data.codec import TokenCodec
from memtrain.data.images import ImageFormat
from memtrain.data.tokenizer import open_tokenizer, train_bpe
from memtrain.deploy.browser import weights
from memtrain.deploy.browser.microscope import fit_plane
from memtrain.deploy.browser.vocabulary import describe_vocabulary
from memtrain.deploy.browser.weights import pack
from memtrain.errors import MemtrainError
from memtrain.generation.generate import generate
from memtrain.generation.pretrained import load_pretrained
from memtrain.models.sampler import Sampler

READ = """
const network = new Network(given.shape, decodeBase64(given.weights));
const rows = given.tokens.length;
let memory = network.emptyMemory(rows);
const logits = [];
for (let t = 0; t < given.tokens[0].length; t++) {
  memory = network.step(memory, given.tokens.map((row) => row[t]));
  logits.push(Array.from(network.predict(memory, rows)));
}
console.log(JSON.stringify(logits));
"""
CELLS = {
    "transformer": {},
    "transformer-one-token": dict(memory_tokens=1),
    "transformer-partly-rotated": dict(rotary_fraction=0.5, memory_tokens=5),
    "transformer-no-projections": dict(memory_dim=24, width=24),
    "mlp": dict(layers=3),
    "gru": dict(memory_tokens=3),
    "lstm": dict(memory_tokens=4),
}


def logits_of(packed, tokens: torch.Tensor) -> torch.Tensor:
    """The page's logits of every step."""
    found = run_node(READ, packed_json(packed) | {"tokens": tokens.tolist()})
    return torch.tensor(found).unflatten(1, (len(tokens), -1)).transpose(0, 1)


@needs_node
@pytest.mark.parametrize("name", CELLS)
def test_logits_equal_those_of_torch_over_200_steps(name: str):
    model = perturbed_model(name.split("-")[0], **CELLS[name])
    tokens = random_tokens_of(model, rows=2)
    with torch.no_grad():
        expected = model(tokens)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits_of(pack(model, "exact"), tokens), expected, rtol=0, atol=1e-5)


@needs_node
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_readouts_of_every_kind_equal_torch(attention: str):
    teacher = dict(head_bias=True, rotary_fraction=0.5, decoder_layers=3, width=20)
    model = perturbed_model(teacher=teacher, readout_attention=attention, memory_tokens=4)
    tokens = random_tokens_of(model, length=50)
    with torch.no_grad():
        expected = model(tokens)
    torch.testing.assert_close(logits_of(pack(model, "exact"), tokens), expected, rtol=0, atol=1e-5)


@needs_node
def test_the_bundled_model_equals_torch_over_a_digit():
    model = load_pretrained("mnist-small")
    tokens = torch.from_numpy(generate(model, count=1, seed=1).tokens)
    packed = pack(model, "exact")
    assert len(packed.weights) < 2.1 * 1_250_816, "its weights fit into 16 bits"
    with torch.no_grad():
        expected = model(tokens)
    torch.testing.assert_close(logits_of(packed, tokens), expected, rtol=0, atol=1e-4)


@needs_node
@pytest.mark.parametrize(("precision", "share"), [("fp16", 0.51), ("int8", 0.4)])
def test_rounded_weights_are_those_that_the_exporter_reports(precision: str, share: float):
    model = perturbed_model("transformer")
    packed = pack(model, precision)
    assert len(packed.weights) < share * len(pack(model, "exact").weights)
    tokens = random_tokens_of(model, length=50)
    with torch.no_grad():
        kept, exact = packed.kept(tokens), model(tokens)
    assert not torch.equal(kept, exact)
    torch.testing.assert_close(logits_of(packed, tokens), kept, rtol=0, atol=1e-5)


def test_a_weight_that_16_bits_cannot_hold_keeps_32():
    model = perturbed_model()
    with torch.no_grad():
        model.cell.embedding.weight[0, 0] = 1e6  # type: ignore[index]
    kinds = {one["name"]: one["type"] for one in pack(model, "fp16").shape["tensors"]}
    assert kinds["cell.embedding.weight"] == "f32" and set(kinds.values()) == {"f32", "f16"}


def test_a_model_that_is_too_large_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(weights, "MAX_WEIGHT_BYTES", 2**16)
    model = perturbed_model("transformer")
    with pytest.raises(
        MemtrainError, match=r"parameters take .*MiB.*take --html-weights (fp16|int8)"
    ):
        pack(model, "exact")
    monkeypatch.setattr(weights, "MAX_WEIGHT_BYTES", 2**8)
    with pytest.raises(MemtrainError, match="export a smaller model"):
        pack(model, "int8")


SAMPLE = """
const random = new Random(7);
const logits = Float32Array.from(given.logits);
const counts = new Array(logits.length).fill(0);
for (let n = 0; n < given.count; n++) counts[sampleToken(logits, given.options, random)]++;
console.log(JSON.stringify(counts));
"""


@needs_node
@pytest.mark.parametrize(
    ("temperature", "top_k"), [(1.0, 0), (0.5, 0), (1.3, 3), (0.0, 0), (0.0, 2)]
)
def test_tokens_are_sampled_with_the_probabilities_of_our_sampler(temperature: float, top_k: int):
    logits = torch.tensor([0.3, -1.0, 2.0, 2.0, 0.0, -30.0])
    uniform = torch.linspace(0, 1, 20_001)[:-1]
    sampler = Sampler(temperature=temperature, top_k=top_k)
    wanted = sampler(logits.expand(len(uniform), -1), uniform).bincount(minlength=6) / 20_000
    options = {"temperature": temperature, "topK": top_k}
    found = run_node(SAMPLE, {"logits": logits.tolist(), "count": 20_000, "options": options})
    torch.testing.assert_close(torch.tensor(found) / 20_000, wanted, rtol=0, atol=0.015)


TEXTS = [
    "It's  a café,\n\n 12 tests!",
    " \u0085x \ufeff",
    "日本語 ’s we'll",
    "a\tb  \n",
    "<|endoftext|>",
]


@needs_node
def test_bpe_text_is_encoded_and_decoded_as_by_its_tokenizer():
    text = "It was the best of tests, it's the worst of tests. " * 20 + "café 12 122 "
    tokenizer = train_bpe([text], 300)
    codec = TokenCodec(vocab_size=300, start_token=0, text=True, tokenizer=tokenizer.text)
    described = describe_vocabulary(codec)
    assert described["bpe"]["refused"] == ""
    texts = [*TEXTS, text]
    code = """
    const vocabulary = new Vocabulary(given.vocabulary);
    const tokens = given.texts.map((text) => vocabulary.encode(text));
    const decoded = given.written.map((row) => row.map(vocabulary.stream()).join(""));
    console.log(JSON.stringify({ tokens, decoded }));
    """
    written = [one.tolist() for one in tokenizer.encode(texts)]
    found = run_node(code, {"vocabulary": described, "texts": texts, "written": written})
    assert found["tokens"] == written
    assert found["decoded"] == texts


def test_typing_is_refused_where_the_page_cannot_encode():
    plain = train_bpe(["It was the best of tests."], 260).text
    other = plain.replace('"add_prefix_space":false', '"add_prefix_space":true')
    assert plain != other and open_tokenizer(other)
    codec = TokenCodec(vocab_size=260, start_token=0, text=True, tokenizer=other)
    assert "in its own way" in describe_vocabulary(codec)["bpe"]["refused"]


@needs_node
@pytest.mark.parametrize(
    ("format_", "dark"),
    [
        (dict(levels=4, patch=2), False),
        (dict(levels=2, patch=2), False),
        (dict(levels=5), True),
        (dict(levels=3, palette=((0, 0, 9), (200, 0, 0), (255, 255, 255))), False),
    ],
)
def test_squares_of_pixels_are_decoded_and_encoded_as_by_the_codec(format_: dict, dark: bool):
    image = ImageFormat(height=4, width=6, **format_)
    codec = TokenCodec(vocab_size=image.vocab_size, start_token=0, picture=image, dark_ink=dark)
    tokens = np.random.default_rng(0).integers(image.vocab_size, size=(1, image.length))
    code = """
    const vocabulary = new Vocabulary(given.vocabulary);
    const levels = new Array(24).fill(-1);
    given.tokens.forEach((token, place) => vocabulary.placePatch(levels, place, token));
    const again = given.tokens.map((_, place) => vocabulary.patchToken(levels, place));
    console.log(JSON.stringify({ again, colours: levels.map((one) => vocabulary.colour(one)) }));
    """
    given = {"vocabulary": describe_vocabulary(codec), "tokens": tokens[0].tolist()}
    found = run_node(code, given)
    assert found["again"] == tokens[0].tolist()
    shown = codec.decode_images(tokens)[0]
    wanted = shown if shown.ndim == 3 else np.repeat(shown[..., None], 3, axis=2)
    np.testing.assert_array_equal(np.array(found["colours"]).reshape(4, 6, 3), wanted)


@pytest.mark.parametrize(("rows", "columns"), [(40, 6), (5, 30), (4, 1)])
def test_a_plane_has_the_directions_of_largest_variance(rows: int, columns: int):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(rows, columns, generator=generator) * torch.arange(1, columns + 1)
    plane = fit_plane(points)
    values = torch.linalg.svdvals((points - points.mean(0)).double()) ** 2
    spread = plane.project(points).double().square().sum(0)
    wanted = torch.cat([values, torch.zeros(1)])[:2]
    torch.testing.assert_close(spread, wanted.to(spread), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.tensor(plane.explained), (wanted / values.sum()).float(), rtol=1e-4, atol=1e-6
    )
