// The page of a model of images: draw the beginning, and the network draws the rest.

const MOST_PENS = 24;

class PicturePage extends Page {
  constructor(model, weights) {
    super(model, weights);
    const { image } = this.vocabulary;
    this.goLabel = "Complete it";
    this.background = this.commonLevel();
    this.ink = this.farthestLevel();
    this.pen = this.ink;
    this.levels = new Uint8Array(image.width * image.height).fill(this.background);
    this.example = 0;
    this.rowsGiven = element("given");
    this.rowsGiven.max = this.vocabulary.rows;
    this.rowsGiven.value = Math.floor(this.vocabulary.rows / 2);
    this.sheet = new Picture(element("sheet"), () => this.drawSheet());
    this.sheet.canvas.style.aspectRatio = `${image.width} / ${image.height}`;
    this.samples = [];
    this.cursor = [Math.floor(image.height / 4), Math.floor(image.width / 2)];
    this.fillClasses();
    this.fillPens();
    this.listen();
    this.setCount(Number(element("count").value));
    this.showExample();
    if (!STILL.matches) this.go();
  }

  /** The level that images have most of. */
  commonLevel() {
    const counts = new Map();
    for (const token of this.examples.flat())
      for (const level of this.vocabulary.patchLevels(token))
        counts.set(level, (counts.get(level) ?? 0) + 1);
    return [...counts].reduce((best, one) => (one[1] > best[1] ? one : best), [0, 0])[0];
  }

  /** The level whose colour differs most from the background. */
  farthestLevel() {
    const from = this.vocabulary.colour(this.background);
    const distance = (level) =>
      Math.hypot(...this.vocabulary.colour(level).map((value, i) => value - from[i]));
    const all = Array.from({ length: this.vocabulary.image.levels }, (_, level) => level);
    return all.reduce((best, level) => (distance(level) > distance(best) ? level : best), 0);
  }

  fillClasses() {
    const select = element("class");
    select.closest("label").hidden = !this.vocabulary.classes.length;
    for (const [number, name] of this.vocabulary.classes.entries())
      select.append(new Option(name, number));
  }

  /** Pens: ink and eraser, or the colours of a palette. */
  fillPens() {
    const { palette } = this.vocabulary.image;
    const every = Math.ceil(palette.length / MOST_PENS); // of a large palette, some colours
    const colours = palette.map((_, level) => level).filter((level) => level % every === 0);
    const pens = palette.length ? colours : [this.ink, this.background];
    const names = palette.length ? pens.map((one) => `colour ${one + 1}`) : ["pen", "eraser"];
    for (const [index, level] of pens.entries()) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "pen";
      button.title = names[index];
      button.setAttribute("aria-label", names[index]);
      button.style.background = `rgb(${this.vocabulary.colour(level)})`;
      button.addEventListener("click", () => this.choosePen(level));
      button.dataset.level = level;
      element("pens").append(button);
    }
    this.choosePen(pens.includes(this.ink) ? this.ink : pens.at(-1));
  }

  choosePen(level) {
    this.pen = level;
    for (const button of element("pens").children)
      button.setAttribute("aria-pressed", String(Number(button.dataset.level) === level));
  }

  listen() {
    element("go").addEventListener("click", () => (this.clock.running ? this.clock.stop() : this.go()));
    element("clear").addEventListener("click", () => {
      this.clock.stop();
      this.levels.fill(this.background);
      this.forget();
    });
    element("example").addEventListener("click", () => {
      this.example = (this.example + 1) % this.examples.length;
      this.showExample();
      this.go();
    });
    element("count").addEventListener("change", () => {
      this.setCount(Number(element("count").value));
      this.go();
    });
    element("class").addEventListener("change", () => this.go());
    this.rowsGiven.addEventListener("input", () => this.forget());
    this.rowsGiven.addEventListener("change", () => this.go());
    const canvas = this.sheet.canvas;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.clock.stop();
      this.from = this.pixelAt(event);
      this.stroke(this.from, this.from);
      event.preventDefault();
      canvas.focus();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.from) return;
      const to = this.pixelAt(event);
      this.stroke(this.from, to);
      this.from = to;
    });
    for (const name of ["pointerup", "pointercancel"])
      canvas.addEventListener(name, () => {
        if (this.from) this.go();
        this.from = null;
      });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.sheet.request());
    canvas.addEventListener("blur", () => this.sheet.request());
  }

  /** Arrow keys move a cursor, the space bar draws there, Enter completes the drawing. */
  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const { width, height } = this.vocabulary.image;
    if (event.key === "Enter") this.go();
    else if (event.key === " ") this.stroke(this.cursor.map((one) => one + 0.5));
    else if (moves[event.key]) {
      const [down, right] = moves[event.key];
      const inside = (value, size) => Math.max(0, Math.min(size - 1, value));
      this.cursor = [inside(this.cursor[0] + down, height), inside(this.cursor[1] + right, width)];
    } else return;
    event.preventDefault();
    this.sheet.request();
  }

  /** Row and column of the pointer, in pixels of the image. */
  pixelAt(event) {
    const box = this.sheet.canvas.getBoundingClientRect();
    const { width, height } = this.vocabulary.image;
    return [
      ((event.clientY - box.top) / box.height) * height,
      ((event.clientX - box.left) / box.width) * width,
    ];
  }

  /** Draw a line with a round pen; between background and ink, its edge has the levels between. */
  stroke(from, to = from) {
    const { width, height, levels, palette } = this.vocabulary.image;
    const radius = Math.max(0.75, Math.min(width, height) / 24); // at least the pixel under the pen
    const between = !palette.length && levels > 2;
    const [dy, dx] = [to[0] - from[0], to[1] - from[1]];
    const length = dx * dx + dy * dy || 1;
    for (let row = 0; row < height; row++) {
      for (let column = 0; column < width; column++) {
        const [y, x] = [row + 0.5 - from[0], column + 0.5 - from[1]];
        const t = Math.max(0, Math.min(1, (x * dx + y * dy) / length));
        const distance = Math.hypot(x - t * dx, y - t * dy);
        const cover = Math.max(0, Math.min(1, radius + 0.5 - distance));
        const place = row * width + column;
        if (!between || this.pen === this.background) {
          if (cover >= 0.5) this.levels[place] = this.pen;
          continue;
        }
        const level = Math.round(this.background + (this.pen - this.background) * cover);
        const further = Math.abs(level - this.background) > Math.abs(this.levels[place] - this.background);
        if (further) this.levels[place] = level;
      }
    }
    this.forget();
  }

  /** Show the drawing alone, until it is completed again. */
  forget() {
    this.clock.stop();
    this.rollout = null;
    element("given-value").value = `${this.rowsGiven.value} of ${this.vocabulary.rows}`;
    this.sheet.request();
    for (const sample of this.samples) sample.request();
    this.refresh();
  }

  showExample() {
    this.levels.fill(this.background);
    for (const [place, token] of this.examples[this.example].entries())
      this.vocabulary.placePatch(this.levels, place, token);
    this.forget();
  }

  setCount(count) {
    this.row = Math.min(this.row, count - 1);
    this.rollout = null;
    const { image } = this.vocabulary;
    const buttons = Array.from({ length: count }, (_, row) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sample";
      button.setAttribute("aria-label", `look into the memory of drawing ${row + 1}`);
      const canvas = button.appendChild(document.createElement("canvas"));
      canvas.style.aspectRatio = `${image.width} / ${image.height}`;
      button.addEventListener("click", () => {
        this.row = row;
        this.refresh();
      });
      for (const name of ["pointermove", "pointerdown"])
        canvas.addEventListener(name, (event) => this.pickPatch(event, row));
      canvas.addEventListener("pointerleave", () => this.leave());
      return button;
    });
    element("samples").replaceChildren(...buttons);
    element("samples").style.setProperty("--columns", Math.ceil(Math.sqrt(count)));
    for (const sample of this.samples) Picture.all.splice(Picture.all.indexOf(sample), 1);
    this.samples = buttons.map(
      (button, row) => new Picture(button.firstChild, () => this.drawSample(row)),
    );
  }

  /** Draw from the part of the sheet that is given, several times. */
  go() {
    const { vocabulary } = this;
    const places = Number(this.rowsGiven.value) * vocabulary.columns;
    const all = vocabulary.rows * vocabulary.columns;
    const given = Array.from({ length: Math.min(places, all - 1) }, (_, place) =>
      vocabulary.patchToken(this.levels, place),
    );
    const count = this.samples.length;
    const chosen = element("class").value;
    let begins = [vocabulary.begin(given)];
    if (vocabulary.classes.length) {
      const number = chosen === "" ? null : Number(chosen);
      const rows = number === null ? count : 1;
      begins = Array.from({ length: rows }, () => [
        vocabulary.classToken(number, this.random),
        ...given,
      ]);
    }
    this.before = vocabulary.startWritten ? 0 : 1; // tokens of a sequence that are no pixels
    this.given = given.length;
    this.drawn = this.samples.map(() => new Int16Array(this.levels.length).fill(-1));
    this.start(begins, count, Infinity);
    this.clock.start();
    this.refresh();
  }

  advance() {
    const { rows, columns } = this.vocabulary;
    if (this.rollout.length >= rows * columns + this.before) {
      if (this.selection.picked === null) this.pickUnsure(); // at the end all is certain
      return false;
    }
    const given = this.rollout.reading;
    this.clock.time(() => this.rollout.advance(this.options));
    const place = this.rollout.length - 1 - this.before;
    if (place >= 0)
      for (const [row, trail] of this.rollout.trails.entries())
        this.vocabulary.placePatch(this.drawn[row], place, trail.at(-1).token);
    if (given) this.clock.due += 0.9; // what is given is read faster than the rest is drawn
    return true;
  }

  refresh() {
    super.refresh();
    for (const [row, button] of [...element("samples").children].entries())
      button.setAttribute("aria-pressed", String(row === this.row));
    for (const sample of this.samples ?? []) sample.request();
    this.sheet?.request();
  }

  /** The place of the square that is expected after a step. */
  stepText(step) {
    const { columns, rows } = this.vocabulary;
    const place = step + 1 - this.before;
    if (place >= rows * columns) return "after the whole image";
    return `in row ${Math.floor(place / columns) + 1}, column ${(place % columns) + 1}`;
  }

  /** Select the step before the patch under the pointer: what was expected there. */
  pickPatch(event, row) {
    if (!this.rollout || row !== this.row) return;
    const box = event.target.getBoundingClientRect();
    const { rows, columns } = this.vocabulary;
    const down = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const right = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const step = down * columns + right + this.before - 1;
    if (step < 0 || step >= this.trail.length) return;
    this.pointAt(step, event);
  }

  // ----------------------------------------------------------------------------------- drawing

  drawSheet() {
    const { context, width, height } = this.sheet.clear();
    const { image, rows } = this.vocabulary;
    const line = (Number(this.rowsGiven.value) / rows) * height;
    const { selected, paper } = colours();
    drawPixels(context, this.toImage(this.levels), 0, 0, width, height);
    context.globalAlpha = 0.72; // what is below the line is not given
    context.fillStyle = paper;
    context.fillRect(0, line, width, height - line);
    context.globalAlpha = 1;
    if (this.rollout) {
      context.save();
      context.beginPath();
      context.rect(0, line, width, height - line);
      context.clip();
      drawPixels(context, this.toImage(this.drawn[this.row]), 0, 0, width, height);
      context.restore();
    }
    context.fillStyle = selected;
    context.fillRect(0, Math.min(height - 2, line - 1), width, 2);
    if (document.activeElement !== this.sheet.canvas || !this.sheet.canvas.matches(":focus-visible"))
      return;
    const size = width / image.width;
    context.strokeStyle = selected;
    context.lineWidth = 2;
    context.strokeRect(this.cursor[1] * size, this.cursor[0] * size, size, size);
  }

  drawSample(row) {
    const { context, width, height } = this.samples[row].clear();
    const { rows, columns } = this.vocabulary;
    const { tint, selected } = colours();
    context.fillStyle = tint;
    context.fillRect(0, 0, width, height);
    if (!this.rollout) return;
    drawPixels(context, this.toImage(this.drawn[row]), 0, 0, width, height);
    context.fillStyle = selected;
    const line = (Math.floor(this.given / columns) / rows) * height;
    if (line) context.fillRect(0, line - 0.5, 5, 1.5), context.fillRect(width - 5, line - 0.5, 5, 1.5);
    const next = this.selection.step + 1 - this.before;
    if (row !== this.row || next >= rows * columns || next < 0) return;
    const [w, h] = [width / columns, height / rows];
    context.strokeStyle = selected;
    context.lineWidth = 1.5;
    context.strokeRect((next % columns) * w, Math.floor(next / columns) * h, w, h);
  }

  /** Levels as pixels; -1 is transparent. */
  toImage(levels) {
    const { width, height } = this.vocabulary.image;
    const image = new ImageData(width, height);
    for (const [place, level] of levels.entries())
      if (level >= 0) image.data.set([...this.vocabulary.colour(level), 255], 4 * place);
    return image;
  }

  showToken(token) {
    const { patch } = this.vocabulary.image;
    const canvas = document.createElement("canvas");
    canvas.className = "patch";
    [canvas.width, canvas.height] = [patch, patch];
    const image = new ImageData(patch, patch);
    for (const [i, level] of this.vocabulary.patchLevels(token).entries())
      image.data.set([...this.vocabulary.colour(level), 255], 4 * i);
    canvas.getContext("2d").putImageData(image, 0, 0);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `square ${token}`);
    return canvas;
  }

  speedText() {
    const several = this.samples.length > 1 && !this.rollout?.reading;
    return `${this.clock.speed} ms per step${several ? ` of ${this.samples.length} drawings` : ""}`;
  }
}
