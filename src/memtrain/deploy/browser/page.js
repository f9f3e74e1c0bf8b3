// Parts of the page: canvases, the list of what is expected, the clock, the selected step.

function element(id) {
  return document.getElementById(id);
}

const DARK = matchMedia("(prefers-color-scheme: dark)");
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
let colourCache = null;

/** The colours of the style sheet, for canvases. */
function colours() {
  if (colourCache) return colourCache;
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const rgb = (hex) => {
    const full = hex.length === 4 ? hex.replace(/[^#]/g, "$&$&") : hex;
    return [1, 3, 5].map((at) => parseInt(full.slice(at, at + 2), 16));
  };
  colourCache = {
    paper: of("--paper"),
    ink: of("--ink"),
    soft: of("--soft"),
    line: of("--line"),
    tint: of("--tint"),
    field: of("--field"),
    trail: of("--c0"),
    selected: of("--c1"),
    cloud: DARK.matches ? "#ffffff26" : "#00000020",
    scale: { low: rgb(of("--c1")), high: rgb(of("--c0")), middle: rgb(of("--paper")) },
  };
  return colourCache;
}

/** A canvas as sharp as the screen, drawn at most once per frame. */
class Picture {
  static all = [];

  constructor(canvas, draw) {
    this.canvas = canvas;
    this.draw = draw;
    this.waiting = false;
    Picture.all.push(this);
    new ResizeObserver(() => this.request()).observe(canvas);
  }

  get width() {
    return this.canvas.clientWidth;
  }

  get height() {
    return this.canvas.clientHeight;
  }

  setHeight(height) {
    if (this.height !== height) this.canvas.style.height = `${height}px`;
  }

  request() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (this.width) this.draw();
    });
  }

  /** The empty canvas's context, in CSS pixels. */
  clear() {
    const scale = devicePixelRatio || 1;
    const [width, height] = [this.width, this.height];
    const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== w || this.canvas.height !== h)
      [this.canvas.width, this.canvas.height] = [w, h];
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    return { context, width, height };
  }
}

DARK.addEventListener("change", () => {
  colourCache = null;
  for (const picture of Picture.all) picture.request();
});

const PIXELS = document.createElement("canvas");

/** Draw an image of single pixels as large squares. */
function drawPixels(context, image, left, top, width, height) {
  [PIXELS.width, PIXELS.height] = [image.width, image.height];
  PIXELS.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(PIXELS, left, top, width, height);
}

function percent(share) {
  if (share >= 0.9995) return "100%";
  return share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(1)}%`;
}

/** The likeliest next tokens of a step as bars. */
class Expectations {
  constructor(show) {
    this.show = show;
    this.list = element("expects");
    this.lines = Array.from({ length: SHOWN_CHOICES }, () => {
      const line = document.createElement("li");
      for (const name of ["label", "bar", "share"]) {
        const part = line.appendChild(document.createElement("span"));
        part.className = name;
      }
      line.children[1].appendChild(document.createElement("i"));
      return this.list.appendChild(line);
    });
  }

  update(step, chosen) {
    for (const [rank, line] of this.lines.entries()) {
      const one = step?.expects[rank];
      line.hidden = !one;
      if (!one) continue;
      const [label, bar, share] = line.children;
      if (line.dataset.token !== String(one.token)) {
        line.dataset.token = one.token;
        label.replaceChildren(this.show(one.token));
      }
      bar.firstChild.style.width = `${Math.max(0.3, 100 * one.share)}%`;
      share.textContent = percent(one.share);
      line.classList.toggle("chosen", one.token === chosen);
    }
  }
}

/** Calls a step at a pace, or as often as fits into each frame; measures its time. */
class Clock {
  constructor(step, onChange) {
    this.step = step;
    this.onChange = onChange;
    this.running = false;
    this.perSecond = 1e9;
    this.milliseconds = null;
  }

  start() {
    if (this.running) return;
    this.running = true;
    this.last = performance.now();
    this.due = 1;
    this.onChange();
    requestAnimationFrame((now) => this.frame(now));
  }

  stop() {
    if (!this.running) return;
    this.running = false;
    this.onChange();
  }

  frame(now) {
    if (!this.running) return;
    this.due = Math.min(60, this.due + (Math.max(0, now - this.last) / 1000) * this.perSecond);
    this.last = now;
    const begin = performance.now();
    try {
      while (this.running && this.due >= 1 && performance.now() - begin < 12) {
        this.due--;
        this.tick();
      }
    } catch (error) {
      this.stop();
      say(error.message);
    }
    this.onChange();
    requestAnimationFrame((later) => this.frame(later));
  }

  tick() {
    if (this.step() === false) this.stop();
  }

  /** Call a function whose time is that of the step. */
  time(compute) {
    const begin = performance.now();
    const found = compute();
    const spent = performance.now() - begin;
    this.milliseconds = this.milliseconds === null ? spent : 0.95 * this.milliseconds + 0.05 * spent;
    return found;
  }

  /** Two digits of the milliseconds per step, lately. */
  get speed() {
    const found = this.milliseconds;
    if (found === null) return "";
    return found < 0.995 ? found.toFixed(2) : found < 9.95 ? found.toFixed(1) : found.toFixed(0);
  }
}

function say(message) {
  element("status").textContent = message;
}

/** The step that is looked at: the newest one, or one that was picked. */
class Selection {
  constructor(onChange) {
    this.onChange = onChange;
    this.picked = null;
    this.pinned = false;
    this.count = 0;
    this.slider = element("step");
    this.slider.addEventListener("input", () => this.pick(Number(this.slider.value)));
    element("live").addEventListener("click", () => this.pick(null));
  }

  get step() {
    return this.picked === null ? this.count - 1 : Math.min(this.picked, this.count - 1);
  }

  /** Select a step; null follows the newest one. */
  pick(step) {
    this.picked = step;
    this.pinned = step !== null;
    this.onChange();
  }

  /** Select a step while the pointer is on it. */
  point(step) {
    this.picked = step;
    this.pinned = false;
    this.onChange();
  }

  setCount(count) {
    this.count = count;
    this.slider.max = Math.max(0, count - 1);
    this.slider.value = Math.max(0, this.step);
    this.slider.disabled = count === 0;
    element("live").setAttribute("aria-pressed", String(this.picked === null));
  }
}

/** What both pages have: the network, its vocabulary, the microscope, the controls of sampling. */
class Page {
  constructor(model, weights) {
    this.network = new Network(model.network, decodeBase64(weights));
    this.vocabulary = new Vocabulary(model.vocabulary);
    this.lens = new Lens(model.memories, this.network.memoryTokens);
    this.examples = model.examples;
    this.random = new Random(crypto.getRandomValues(new Uint32Array(1))[0]);
    this.rollout = null;
    this.row = 0;
    this.microscope = new Microscope(this.lens, memoryNames(this.network));
    this.selection = new Selection(() => this.refresh());
    element("unsure").addEventListener("click", () => this.pickUnsure());
    this.microscope.onPick = (step, event) => this.pointAt(step, event);
    this.microscope.plane.canvas.addEventListener("pointerleave", () => this.leave());
    this.clock = new Clock(() => this.advance(), () => this.refresh());
    this.expectations = new Expectations((token) => this.showToken(token));
    const temperature = element("temperature");
    const showTemperature = () => (element("temperature-value").value = temperature.value);
    temperature.addEventListener("input", showTemperature);
    showTemperature();
    const pace = element("pace");
    const setPace = () => (this.clock.perSecond = Number(pace.value) || 1e9);
    pace.addEventListener("change", setPace);
    setPace();
  }

  get options() {
    const topK = Number(element("top-k").value);
    return { temperature: Number(element("temperature").value), topK };
  }

  get trail() {
    return this.rollout ? this.rollout.trails[this.row] : [];
  }

  start(begins, count, kept) {
    const { network, lens, random } = this;
    const { writable } = this.vocabulary;
    this.rollout = new Rollout({ network, lens, writable, begins, count, kept, random });
    this.selection.pick(null);
    this.clock.milliseconds = null;
  }

  /** Select a step by pointing at it; a click keeps it. */
  pointAt(step, event) {
    if (event.type === "pointerdown") this.selection.pick(step);
    else if (!this.selection.pinned) this.selection.point(step);
  }

  /** Follow the newest step again after the pointer has left, while tokens come. */
  leave() {
    if (this.clock.running && !this.selection.pinned) this.selection.pick(null);
  }

  /** Select the written token before which the network was least certain. */
  pickUnsure() {
    let best = -1;
    const share = (step) => this.trail[step].expects[0].share;
    for (let step = 0; step + 1 < this.trail.length; step++)
      if (!this.trail[step + 1].given && (best < 0 || share(step) < share(best))) best = step;
    if (best >= 0) this.selection.pick(best);
  }

  refresh() {
    this.selection.setCount(this.trail.length);
    const { step } = this.selection;
    this.microscope.show(this.trail, step);
    this.expectations.update(this.trail[step], this.trail[step + 1]?.token);
    element("go").textContent = this.clock.running ? "Stop" : this.goLabel;
    const dropped = this.rollout ? this.rollout.dropped : 0;
    element("step-name").textContent = this.trail.length ? `after token ${dropped + step + 1}` : "";
    element("expects-name").textContent = this.trail.length ? this.stepText(step) : "nothing yet";
    if (this.clock.speed) element("speed").textContent = this.speedText();
  }
}

/** Names of the memory's tokens. */
function memoryNames({ kind, memoryTokens }) {
  return Array.from({ length: memoryTokens }, (_, token) => {
    if (kind === "gru") return `layer ${token + 1}`;
    if (kind === "lstm") return `layer ${Math.floor(token / 2) + 1}, ${token % 2 ? "c" : "h"}`;
    return `token ${token + 1}`;
  });
}
