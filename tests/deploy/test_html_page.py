"""The page of `memtrain export --html` in chromium, opened as a file."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser_testing import (
    BYTES,
    Opened,
    chromium,
    opened,
    page_of,
    perturbed_model,
    random_tokens_of,
)

from memtrain.cli import main
from memtrain.data.codec import TokenCodec
from memtrain.data.images import ImageFormat
from memtrain.deploy.browser import microscope
from memtrain.errors import MemtrainError
from memtrain.generation.generate import generate
from memtrain.generation.pretrained import load_pretrained

LOGITS = """(tokens) => {
  let memory = PAGE.network.emptyMemory(1);
  return tokens.map((token) => {
    memory = PAGE.network.step(memory, [token]);
    return Array.from(PAGE.network.predict(memory, 1));
  });
}"""
GREY = ImageFormat(height=6, width=6, levels=4, patch=2)
DRAWINGS = TokenCodec(vocab_size=256, start_token=0, picture=GREY)
CLASSES = TokenCodec(
    vocab_size=258,
    start_token=0,
    start_written=False,
    picture=GREY,
    classes=("cat", "dog"),
    class_counts=(1, 3),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are made from short sequences."""
    monkeypatch.setattr(microscope, "SAMPLED_STEPS", 24)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def set_slider(shown: Opened, name: str, value: float) -> None:
    shown.page.locator(f"#{name}").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input'));"
        " slider.dispatchEvent(new Event('change')); }",
        value,
    )


def wait_until_idle(shown: Opened) -> None:
    shown.page.wait_for_function("() => !PAGE.clock.running")


@pytest.mark.parametrize("kind", ["transformer", "mlp", "gru", "lstm"])
def test_logits_in_the_page_equal_those_of_torch_over_200_steps(
    browser: Any, kind: str, tmp_path: Path
):
    model = perturbed_model(kind)
    tokens = random_tokens_of(model)
    with torch.no_grad():
        expected = model(tokens)[0]
    with opened(browser, page_of(model, tmp_path)) as shown:
        found = torch.tensor(shown.page.evaluate(LOGITS, tokens[0].tolist()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_bundled_model_draws_in_the_page_what_it_draws_in_torch(
    browser: Any, tmp_path: Path, capsys
):
    path = tmp_path / "page.html"
    assert main(["export", "mnist-small", "--html", str(path)]) == 0
    assert "1,250,816 parameters" in capsys.readouterr().out
    model = load_pretrained("mnist-small")
    tokens = torch.from_numpy(generate(model, count=1, temperature=0.0).tokens)
    with opened(browser, path) as shown:
        set_slider(shown, "temperature", 0)
        shown.page.locator("#count").select_option("1")
        shown.page.locator("#pace").select_option("0")
        set_slider(shown, "given", 0)
        wait_until_idle(shown)
        drawn = shown.page.evaluate("PAGE.rollout.trails[0].map((step) => step.token)")
    assert drawn == tokens[0].tolist()


@pytest.mark.parametrize("prompt", ["It was ", ""])
def test_text_at_temperature_0_is_that_of_generate(browser: Any, prompt: str, tmp_path: Path):
    model = perturbed_model("transformer")
    wanted = generate(model, prompt=prompt or None, temperature=0.0, length=60).texts()[0]
    with opened(browser, page_of(model, tmp_path)) as shown:
        set_slider(shown, "temperature", 0)
        shown.page.locator("#pace").select_option("0")
        shown.page.locator("#prompt").fill(prompt)
        wait_until_idle(shown)
        shown.page.get_by_role("button", name="Continue").click()
        wait_until_idle(shown)
        text = shown.page.locator("#text").text_content()
        assert "Paused" in shown.page.locator("#status").text_content()
    assert text.startswith(wanted) and len(wanted) > 60 - 2


def test_what_is_typed_is_read_at_once_and_shows_what_is_expected(browser: Any, tmp_path: Path):
    model = perturbed_model()
    with torch.no_grad():
        logits = model(torch.from_numpy(BYTES.encode_text("ab")[None]))[0, -1]
    with opened(browser, page_of(model, tmp_path)) as shown:
        shown.page.locator("#prompt").type("ab")
        wait_until_idle(shown)
        first = shown.page.locator("#expects li").first
        assert shown.page.locator("#expects li").count() == 8
        assert shown.page.locator("#text").text_content() == "ab"
        share = float(first.locator(".share").text_content().rstrip("%")) / 100
        assert share == pytest.approx(float(logits.softmax(0).max()), abs=6e-4)
        token = int(first.get_attribute("data-token"))
        assert token == int(logits.argmax())
        shown.page.locator("#prompt").fill("é")
        assert "does not occur in the training text" in shown.page.locator("#status").text_content()
        shown.page.get_by_role("button", name="Start over").click()
        shown.page.get_by_role("button", name="One token").click()
        wait_until_idle(shown)
        assert shown.page.evaluate("PAGE.trail.length") == 2  # the start token, and one


def test_a_point_of_the_trail_shows_what_that_memory_expected(browser: Any, tmp_path: Path):
    with opened(browser, page_of(perturbed_model(), tmp_path)) as shown:
        shown.page.locator("#prompt").fill("abcdefgh")
        wait_until_idle(shown)
        plane = shown.page.locator("#plane")
        plane.scroll_into_view_if_needed()
        x, y = shown.page.evaluate(
            "() => { const { microscope: m } = PAGE; return m.placer(m.lens.whole, 0, 0,"
            " m.plane.width, m.plane.height)(PAGE.trail[2].place); }"
        )
        plane.hover(position={"x": x, "y": y})
        step = shown.page.evaluate("PAGE.selection.step")
        at = shown.page.evaluate("(step) => PAGE.trail[step].place", step)
        there = shown.page.evaluate("PAGE.trail[2].place")
        assert at == pytest.approx(there, abs=0.5)
        assert shown.page.locator("#step-name").text_content() == f"after token {step + 1}"
        slider = shown.page.locator("#step")
        slider.focus()
        slider.press("Home")
        assert shown.page.evaluate("PAGE.selection.step") == 0
        slider.press("ArrowRight")
        assert shown.page.evaluate("PAGE.selection.step") == 1
        assert "after “ab”" in shown.page.locator("#expects-name").text_content()
        assert shown.page.locator("#text .next").text_content() == "c"
        shown.page.get_by_role("button", name="Newest").click()
        assert shown.page.evaluate("PAGE.selection.step") == 7


def test_a_click_keeps_a_step_and_pointing_does_not(browser: Any, tmp_path: Path):
    with opened(browser, page_of(perturbed_model(), tmp_path)) as shown:
        shown.page.locator("#prompt").fill("abcdefgh")
        wait_until_idle(shown)
        letters = shown.page.locator("#text span")
        letters.nth(3).hover()
        assert shown.page.evaluate("PAGE.selection.step") == 2
        letters.nth(5).hover()
        assert shown.page.evaluate("PAGE.selection.step") == 4
        letters.nth(5).click()
        letters.nth(1).hover()
        assert shown.page.evaluate("PAGE.selection.step") == 4
        shown.page.locator("#pace").select_option("8")
        shown.page.get_by_role("button", name="Continue").click()
        shown.page.wait_for_function("() => PAGE.selection.step > 8")
        letters.nth(3).hover()
        assert shown.page.evaluate("PAGE.selection.step") == 2
        shown.page.locator("h1").hover()
        assert shown.page.evaluate("PAGE.selection.step") > 7
        shown.page.get_by_role("button", name="Stop").click()
        count = shown.page.evaluate("PAGE.trail.length")
        shown.page.get_by_role("button", name="Least certain").click()
        step = shown.page.evaluate("PAGE.selection.step")
        shares = shown.page.evaluate("PAGE.trail.map((step) => step.expects[0].share)")
        assert shares[step] == min(shares[7 : count - 1]) and step >= 7


def test_a_drawing_is_given_to_the_network_and_completed(browser: Any, tmp_path: Path):
    model = perturbed_model("transformer", DRAWINGS)
    with opened(browser, page_of(model, tmp_path), touch=True) as shown:
        shown.page.get_by_role("button", name="Clear").click()
        shown.page.locator("#sheet").tap(position={"x": 200, "y": 40})
        wait_until_idle(shown)
        levels, background, trails = shown.page.evaluate(
            "[Array.from(PAGE.levels), PAGE.background,"
            " PAGE.rollout.trails.map((trail) => trail.map((step) => step.token))]"
        )
        assert set(levels) != {background}
        given = shown.page.evaluate(
            "[0, 1, 2].map((place) => PAGE.vocabulary.patchToken(PAGE.levels, place))"
        )
        assert len(trails) == 4 and all(len(trail) == 9 for trail in trails)
        assert all(trail[:3] == given for trail in trails)
        shown.page.locator(".sample").nth(2).click()
        assert shown.page.evaluate("PAGE.row") == 2
        sheet = shown.page.locator("#sheet")
        sheet.press("ArrowDown")
        sheet.press(" ")
        sheet.press("Enter")
        wait_until_idle(shown)
        assert shown.page.evaluate("PAGE.trail.length") == 9


def test_images_of_a_class_begin_with_its_token(browser: Any, tmp_path: Path):
    with opened(browser, page_of(perturbed_model("lstm", CLASSES), tmp_path)) as shown:
        shown.page.get_by_label("Class").select_option("dog")
        wait_until_idle(shown)
        first, longest = shown.page.evaluate("[PAGE.trail[0].token, PAGE.trail.length]")
        assert (first, longest) == (257, 10)
        shown.page.get_by_label("Class").select_option("any")
        wait_until_idle(shown)
        drawn = shown.page.evaluate("PAGE.rollout.trails.flatMap((t) => t.map((s) => s.token))")
        assert {token for token in drawn if token > 255} <= {256, 257} and len(drawn) == 40


def test_sequences_of_numbers_are_typed_and_written_as_numbers(browser: Any, tmp_path: Path):
    model = perturbed_model("mlp", TokenCodec(vocab_size=9, start_token=8, start_written=False))
    wanted = generate(model, prompt="3 1", temperature=0.0, length=20).texts()[0]
    with opened(browser, page_of(model, tmp_path)) as shown:
        set_slider(shown, "temperature", 0)
        shown.page.locator("#pace").select_option("0")
        shown.page.locator("#prompt").fill("3 8")
        assert "must be a number 0 to 7" in shown.page.locator("#status").text_content()
        shown.page.locator("#prompt").fill("3 1")
        shown.page.get_by_role("button", name="Continue").click()
        wait_until_idle(shown)
        assert shown.page.locator("#text").text_content().startswith(wanted)


def test_colours_of_a_palette_are_pens(browser: Any, tmp_path: Path):
    palette = tuple((3 * n, 90, 255 - 3 * n) for n in range(60))
    image = ImageFormat(height=4, width=5, levels=60, palette=palette)
    model = perturbed_model("gru", TokenCodec(vocab_size=60, start_token=0, picture=image))
    with opened(browser, page_of(model, tmp_path)) as shown:
        assert 10 < shown.page.locator(".pen").count() <= 24
        shown.page.get_by_role("button", name="colour 4", exact=True).click()
        shown.page.locator("#sheet").click(position={"x": 10, "y": 10})
        wait_until_idle(shown)
        assert shown.page.evaluate("[PAGE.levels[0], PAGE.trail[0].token, PAGE.trail.length]") == [
            3,
            3,
            20,
        ]


@pytest.mark.parametrize("codec", [BYTES, DRAWINGS], ids=["text", "images"])
def test_a_page_fits_the_width_of_a_phone(browser: Any, codec: TokenCodec, tmp_path: Path):
    model = perturbed_model("transformer", codec, memory_tokens=16)
    with opened(browser, page_of(model, tmp_path), width=360, touch=True) as shown:
        shown.page.get_by_role("button", name=re.compile("Continue|Complete")).tap()
        shown.page.wait_for_function("() => PAGE.trail.length > 5")
        wide = shown.page.evaluate("document.documentElement.scrollWidth")
    assert wide == 360


def test_names_and_tokens_are_text_and_no_markup(tmp_path: Path):
    text = page_of(perturbed_model(), tmp_path).read_text()
    assert "tiny &lt;model&gt;" in text and "tiny <model>" not in text
    assert re.search(r"default-src 'none'; .*script-src 'sha256-", text)
    assert not re.search(r"https?://", text)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("attention", "cell.kind=attention reads its last tokens again"),
        ("torch.nn:GRUCell", "cell.kind=torch.nn:GRUCell is not written in the page's script"),
    ],
)
def test_other_cells_are_refused(kind: str, message: str, tmp_path: Path):
    model = perturbed_model(kind)
    with pytest.raises(MemtrainError, match=re.escape(message)):
        page_of(model, tmp_path)


def test_tasks_that_ask_for_answers_are_refused(tmp_path: Path):
    model = perturbed_model()
    model.spelling = None
    with pytest.raises(MemtrainError, match="asks for answers"):
        page_of(model, tmp_path)


def test_a_diverged_network_is_refused(tmp_path: Path):
    model = perturbed_model()
    with torch.no_grad():
        model.readout.head.weight.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(MemtrainError, match="logits are not finite"):
        page_of(model, tmp_path)


@pytest.mark.parametrize("name", ["page", "page.png"])
def test_a_page_ends_in_html(name: str, capsys, tmp_path: Path):
    assert main(["export", "mnist-small", "--html", str(tmp_path / name)]) == 2
    assert "end the name in .html" in capsys.readouterr().err
