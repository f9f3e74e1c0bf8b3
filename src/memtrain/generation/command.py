"""What `memtrain generate` does: text to the terminal as it is written, pictures to a PNG."""

import codecs
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from memtrain.cli.suggest import refuse_name_of_run
from memtrain.errors import MemtrainError, printable
from memtrain.files import refuse_links
from memtrain.generation.generate import Samples, Writer, check_text_file, generate
from memtrain.generation.pretrained import load_pretrained, load_rnn, pretrained_names
from memtrain.models.sampler import Sampler
from memtrain.training.console import Reporter, drawing
from memtrain.training.run import Run
from memtrain.training.run_folder import is_run


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """What is to be written, and how."""

    count: int | None = None
    length: int | None = None
    prompt: str | None = None
    given: float | None = None
    image: Path | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise MemtrainError(f"count={self.count}: must be at least 1")
        if self.given is not None and not 0 < self.given < 1:
            raise MemtrainError(f"given={self.given}: must be above 0 and below 1; 0.5 is half")
        if not 0 <= self.seed < 2**63:
            raise MemtrainError(f"seed={self.seed}: must be at least 0 and below 2**63")
        if self.prompt is not None and (self.image or self.given):
            raise MemtrainError("--prompt is for text, --given and --image are for pictures")
        if self.length is not None and self.length < 1:
            raise MemtrainError(f"length={self.length}: must be at least 1")
        if self.out is not None and self.out.is_dir():
            raise MemtrainError(f"out={self.out}: is a folder; name a file in it")
        Sampler(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)  # says why not


def find_writer(
    name: str, wish: GenerateOptions, *, allow_code: bool, best: bool, reporter: Reporter
) -> Writer:
    """The RNN of the run in a folder of that name, else the pretrained model of that name."""
    if is_run(name):
        model = load_rnn(name, allow_code=allow_code, best=best, reporter=reporter)
        if model.spelling is None:
            raise MemtrainError(
                f"{name}: its task ({model.config.data.kind}) asks for answers and has no "
                "sequences to write; try a run of digits"
            )
        if wish.given is None or wish.image is not None or model.spelling.picture is None:
            return model
        return Run.open(name, allow_code=allow_code, best=best)  # it knows its held-out pictures
    names = pretrained_names()
    if name not in names:
        refuse_name_of_run(Path(name))
        held = f"the pretrained models are {', '.join(names)}" if names else "none is installed"
        raise MemtrainError(f"{name}: no run there, and no pretrained model of that name; {held}")
    return load_pretrained(name, device="cuda" if torch.cuda.is_available() else "cpu")


def write_wish(model: Writer, name: str, wish: GenerateOptions) -> None:
    """Write what is wished for; text goes to stdout, of pictures the file's path."""
    spelling = model.spelling
    assert spelling is not None
    if spelling.picture is None:
        if wish.given is not None or wish.image is not None:
            option = "--image" if wish.image else "--given"
            writes = "text" if spelling.text else "tokens"
            raise MemtrainError(f"{option}: this model writes {writes}; begin with --prompt")
        if wish.out is not None:
            check_text_file(wish.out)  # before anything is written to the terminal
        written = _write_text(model, wish)
        if wish.out is not None:
            written.save(wish.out)
        return
    if wish.out is not None and wish.out.suffix.lower() != ".png":
        raise MemtrainError(f"out={wish.out}: pictures are written as a PNG; end it in .png")
    originals = _originals(model, wish)
    prompt = wish.prompt  # a text is refused in words
    count = wish.count or 64
    if originals is not None:
        count, length = originals.shape
        prompt = originals[:, : min(length - 1, max(1, round((wish.given or 0.5) * length)))]
    given = prompt.shape[1] if isinstance(prompt, np.ndarray) else 0
    with drawing(count, spelling.picture.length - given) as listen:
        written = _generate(model, wish, count, prompt, listen)
    path = wish.out
    if path is None:
        path = _place(name) / f"{_kind(wish)}{count}-seed{wish.seed}.png"
        refuse_links(path, Path(name))
    written.save(path, originals)
    print(path)


def _generate(model: Writer, wish: GenerateOptions, count: int, prompt, listen=None) -> Samples:
    return generate(
        model,
        prompt=prompt,
        count=count,
        length=wish.length,
        temperature=wish.temperature,
        top_k=wish.top_k,
        top_p=wish.top_p,
        seed=wish.seed,
        listen=listen,
    )


def _write_text(model: Writer, wish: GenerateOptions) -> Samples:
    """One text as it is written; several under headings, once they are all written."""
    spelling = model.spelling
    assert spelling is not None
    count = wish.count or 1
    if count > 1:
        written = _generate(model, wish, count, wish.prompt)
        for number, text in enumerate(written.texts(), start=1):
            print(f"---- {number} of {count} ----\n{for_reader(text.lstrip(chr(10)))}\n")
        return written
    # A character may take several bytes, of which a piece may hold the first ones only.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(tokens: np.ndarray) -> None:
        row = tokens[0]
        text = decoder.decode(row.astype(np.uint8).tobytes()) if spelling.text else None
        shown = " ".join(map(str, row)) + " " if text is None else for_reader(text)
        print(shown, end="", flush=True)

    if wish.prompt is not None:
        show(spelling.encode_text(wish.prompt)[None])
    try:
        return _generate(model, wish, 1, wish.prompt, show)
    finally:
        print(decoder.decode(b"", final=True), flush=True)


def for_reader(text: str) -> str:
    """Text as stdout takes it: a terminal gets control characters written out, as they could
    rename, clear or reprogram it; a pipe or a file gets every character as the model wrote it."""
    return printable(text) if sys.stdout.isatty() else text


def _originals(model: Writer, wish: GenerateOptions) -> np.ndarray | None:
    """Whole pictures of which the first part is given."""
    spelling = model.spelling
    assert spelling is not None
    if wish.image is not None:
        return np.tile(spelling.encode_image(wish.image), (wish.count or 8, 1))
    if wish.given is None:
        return None
    if not isinstance(model, Run):
        raise MemtrainError("--given: a pretrained model holds no images; complete --image FILE")
    generator = torch.Generator().manual_seed(wish.seed)
    pictures = model.task.held_out_pictures(wish.count or 16, generator)
    assert pictures is not None
    if wish.count and len(pictures) < wish.count:
        print(f"only {len(pictures)} images are held out", file=sys.stderr)
    return pictures.cpu().numpy()


def _place(name: str) -> Path:
    return Path(name) / "samples" if is_run(name) else Path(name)


def _kind(wish: GenerateOptions) -> str:
    return "image-" if wish.image else "given-" if wish.given else ""
