// The page of a model of text, or of sequences of numbers.

const PAUSE = 500;
const KEPT_STEPS = 3000;

class TextPage extends Page {
  constructor(model, weights) {
    super(model, weights);
    this.microscope.label = (token) => this.vocabulary.label(token);
    this.text = element("text");
    this.prompt = element("prompt");
    this.goLabel = "Continue";
    if (this.vocabulary.refused) {
      this.prompt.disabled = true;
      this.prompt.placeholder = `Typing is off: ${this.vocabulary.refused}.`;
    }
    this.prompt.addEventListener("input", () => this.read());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.go();
    });
    element("go").addEventListener("click", () => this.go());
    element("one").addEventListener("click", () => this.one());
    element("reset").addEventListener("click", () => this.reset());
    this.text.addEventListener("pointerover", (event) => this.pickText(event));
    this.text.addEventListener("pointerdown", (event) => this.pickText(event));
    this.text.addEventListener("pointerleave", () => this.leave());
    element("surprise").addEventListener("change", () => this.text.classList.toggle("plain"));
    this.read();
    if (!STILL.matches) this.go();
  }

  /** Begin again with the text that is typed, which is read at once. */
  read() {
    this.clock.stop();
    let tokens;
    try {
      tokens = this.vocabulary.encode(this.prompt.value);
    } catch (error) {
      this.prompt.setAttribute("aria-invalid", "true");
      say(error.message);
      return false;
    }
    this.prompt.removeAttribute("aria-invalid");
    say("");
    this.shownStart = this.vocabulary.startWritten ? 0 : 1; // the start token is not shown
    this.stream = this.vocabulary.stream();
    this.text.replaceChildren();
    this.spans = [];
    this.limit = Infinity;
    this.reading = true;
    this.pausing = false;
    this.start([this.vocabulary.begin(tokens)], 1, KEPT_STEPS);
    this.clock.start();
    return true;
  }

  go() {
    if (this.clock.running && !this.reading) return this.clock.stop();
    if (this.prompt.hasAttribute("aria-invalid")) return;
    this.reading = false;
    this.limit = Math.max(this.rollout.length, this.rollout.queue[0].length) + PAUSE;
    this.pausing = true;
    say("");
    this.selection.pick(null);
    this.clock.start();
  }

  one() {
    if (this.prompt.hasAttribute("aria-invalid")) return;
    this.reading = false;
    this.limit = Math.max(this.rollout.length, this.rollout.queue[0].length) + 1;
    this.selection.pick(null);
    this.clock.start();
  }

  reset() {
    this.prompt.value = "";
    this.read();
    this.prompt.focus();
  }

  advance() {
    // A beginning is read at once, whatever the pace.
    const rollout = this.rollout;
    if (!rollout.reading && (this.reading || rollout.length >= this.limit)) {
      this.reading = false;
      if (this.pausing) say(`Paused after ${PAUSE} tokens.`);
      this.pausing = false;
      return false;
    }
    const given = rollout.reading;
    const [token] = this.clock.time(() => rollout.advance(this.options));
    if (given) this.clock.due++;
    this.append(token);
    return true;
  }

  append(token) {
    const step = this.rollout.trails[0].at(-1);
    const hidden = this.rollout.length <= this.shownStart;
    const span = document.createElement("span");
    if (!hidden) span.textContent = this.stream(token);
    if (step.given) span.className = "given";
    else if (step.share !== null) {
      const bits = Math.max(0, Math.min(10, -Math.log2(step.share) - 2));
      span.style.setProperty("--surprise", `${Math.round(5 * bits)}%`);
      span.title = `${percent(step.share)}`;
    }
    this.text.append(span);
    this.spans.push(span);
    if (this.spans.length > KEPT_STEPS) this.spans.shift().remove();
  }

  /** Select what was expected where the pointer is: the step before that token. */
  pickText(event) {
    const place = this.spans.indexOf(event.target);
    if (place < 0) return;
    const behind = this.trail.length - this.spans.length; // spans that are no longer shown
    this.pointAt(Math.max(0, place + behind - 1), event);
  }

  refresh() {
    super.refresh();
    this.marked?.classList.remove("next");
    const behind = this.trail.length - (this.spans?.length ?? 0);
    this.marked = this.spans?.[this.selection.step + 1 - behind];
    this.marked?.classList.add("next");
    if (this.selection.picked === null) this.text.scrollTop = this.text.scrollHeight;
    element("one").disabled = this.clock.running && !this.reading;
  }

  /** The end of the text up to a step. */
  stepText(step) {
    const behind = this.trail.length - this.spans.length;
    const spans = this.spans.slice(Math.max(0, step - behind - 23), Math.max(0, step - behind + 1));
    const text = spans.map((span) => span.textContent).join("").replace(/\s+/g, " ");
    return text ? `after “${text.length > 24 ? "…" : ""}${text.slice(-24)}”` : "at the start";
  }

  showToken(token) {
    const code = document.createElement("code");
    code.textContent = this.vocabulary.label(token);
    return code;
  }

  speedText() {
    return `${this.clock.speed} ms per token`;
  }
}
