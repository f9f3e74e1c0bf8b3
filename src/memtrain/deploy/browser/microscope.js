// The memory microscope: where the memory lies, how its tokens move, and all its numbers.

/** Projects memories to the two directions that the page's maker found. */
class Lens {
  constructor(described, tokens) {
    this.whole = Lens.plane(described.whole);
    this.tokens = described.tokens.map(Lens.plane);
    this.scale = 127 / described.largest;
    this.width = this.whole.centre.length / tokens;
  }

  static plane({ centre, axes, explained, cloud }) {
    const plane = { explained, centre: decodeFloats(centre), axes: decodeFloats(axes) };
    plane.cloud = decodeFloats(cloud);
    plane.bounds = Lens.bounds(plane.cloud);
    return plane;
  }

  /** Middle and half of the range of a cloud of points, along each axis; a few points that are
   * far from the others are drawn at the edge. */
  static bounds(cloud) {
    return [0, 1].map((axis) => {
      const values = cloud.filter((_, index) => index % 2 === axis).sort();
      const low = values[Math.floor(0.015 * (values.length - 1))];
      const high = values[Math.ceil(0.985 * (values.length - 1))];
      return { middle: (low + high) / 2, half: Math.max(0.62 * (high - low), 1e-6) };
    });
  }

  static project(plane, values) {
    const size = plane.centre.length;
    let x = 0;
    let y = 0;
    for (let i = 0; i < size; i++) {
      const value = values[i] - plane.centre[i];
      x += value * plane.axes[i];
      y += value * plane.axes[size + i];
    }
    return [x, y];
  }

  /** Where a memory lies, where each of its tokens lies, and its numbers in 8 bits. */
  look(memory) {
    const at = (token) => memory.subarray(token * this.width, (token + 1) * this.width);
    return {
      place: Lens.project(this.whole, memory),
      places: this.tokens.map((plane, token) => Lens.project(plane, at(token))),
      numbers: Int8Array.from(memory, (value) =>
        Math.max(-127, Math.min(127, Math.round(value * this.scale))),
      ),
    };
  }
}

const TRAIL = 48;
const SHOWN_TOKENS = 32;

/** The pictures of one sequence's memories, up to a selected step. */
class Microscope {
  constructor(lens, names) {
    this.lens = lens;
    this.names = names.slice(0, SHOWN_TOKENS);
    this.plane = new Picture(element("plane"), () => this.drawPlane());
    this.numbers = new Picture(element("numbers"), () => this.drawNumbers());
    this.tokens = names.length > 1 ? new Picture(element("tokens"), () => this.drawTokens()) : null;
    element("tokens-part").hidden = names.length === 1;
    this.trail = [];
    this.selected = -1;
    this.onPick = () => {};
    this.label = () => "";
    const canvas = this.plane.canvas;
    canvas.addEventListener("pointermove", (event) => this.pick(event));
    canvas.addEventListener("pointerdown", (event) => this.pick(event));
  }

  show(trail, selected) {
    this.trail = trail;
    this.selected = selected;
    this.plane.request();
    this.numbers.request();
    this.tokens?.request();
  }

  /** Select the step whose point is nearest to the pointer, if one is near. */
  pick(event) {
    const box = this.plane.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let nearest = -1;
    let least = event.pointerType === "touch" ? 28 : 18;
    const place = this.placer(this.lens.whole, 0, 0, this.plane.width, this.plane.height);
    const [from, to] = this.shown();
    for (let step = from; step < to; step++) {
      const [px, py] = place(this.trail[step].place);
      const distance = Math.hypot(px - x, py - y);
      if (distance <= least) [nearest, least] = [step, distance];
    }
    if (nearest >= 0) this.onPick(nearest, event);
  }

  /** The steps of the trail that are drawn. They stay while the pointer selects among them. */
  shown() {
    const to = Math.min(this.trail.length, Math.max(this.selected + 1, this.trail.length));
    const from = Math.max(0, Math.min(to - TRAIL, this.selected - TRAIL / 2));
    return [from, Math.min(to, from + TRAIL + 1)];
  }

  /** A function from a point to its place within a box of the canvas. */
  placer(plane, left, top, width, height) {
    const [x, y] = plane.bounds;
    const inside = (value, size) => Math.max(4, Math.min(size - 4, value));
    return ([px, py]) => [
      left + inside((width / 2) * (1 + (px - x.middle) / x.half), width),
      top + inside((height / 2) * (1 - (py - y.middle) / y.half), height),
    ];
  }

  drawCloud(context, plane, place, size) {
    context.fillStyle = colours().cloud;
    for (let i = 0; i < plane.cloud.length; i += 2) {
      const [x, y] = place([plane.cloud[i], plane.cloud[i + 1]]);
      context.fillRect(x - size / 2, y - size / 2, size, size);
    }
  }

  /** A line through points, fainter far from the selected one. */
  drawTrail(context, points, at, radius, width) {
    const { trail, selected, paper } = colours();
    context.strokeStyle = trail;
    context.fillStyle = trail;
    context.lineWidth = width;
    context.lineJoin = "round";
    for (const [index, [x, y]] of points.entries()) {
      const ahead = index > at;
      context.globalAlpha = ahead ? 0.18 : Math.max(0.08, 0.9 - (at - index) / 24);
      if (index) {
        context.beginPath();
        context.moveTo(...points[index - 1]);
        context.lineTo(x, y);
        context.stroke();
      }
      if (radius > 3) disc(context, x, y, radius * 0.5);
    }
    context.globalAlpha = 1;
    if (!points[at]) return;
    context.fillStyle = paper;
    disc(context, ...points[at], radius + 2);
    context.fillStyle = selected;
    disc(context, ...points[at], radius);
  }

  drawPlane() {
    const { context, width, height } = this.plane.clear();
    const whole = this.lens.whole;
    const place = this.placer(whole, 0, 0, width, height);
    this.drawCloud(context, whole, place, 2.5);
    const [from, to] = this.shown();
    const points = this.trail.slice(from, to).map((step) => place(step.place));
    this.drawTrail(context, points, this.selected - from, 6.5, 1.75);
    this.drawLabels(context, points, from);
    const percent = whole.explained.map((share) => `${Math.round(100 * share)}%`);
    note(context, `first direction, ${percent[0]} of the variance →`, width - 10, height - 10, "right");
    context.save();
    context.translate(16, 10);
    context.rotate(-Math.PI / 2);
    note(context, `second, ${percent[1]} →`, 0, 0, "right");
    context.restore();
  }

  /** What was read last, at the newest points up to the selected one. */
  drawLabels(context, points, from) {
    context.font = "14px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace";
    context.textAlign = "center";
    context.lineWidth = 4;
    context.strokeStyle = colours().field;
    context.fillStyle = colours().ink;
    const at = this.selected - from;
    const drawn = [];
    for (let index = at; index >= Math.max(0, at - 11); index--) {
      const text = this.label(this.trail[from + index].token).slice(0, 10);
      const [x, y] = points[index];
      const half = 5 * text.length + 4;
      const covers = (one) => Math.abs(one.x - x) < half + one.half && Math.abs(one.y - y) < 17;
      if (drawn.some(covers)) continue;
      drawn.push({ x, y, half });
      context.globalAlpha = Math.max(0.25, 1 - (at - index) / 12);
      context.strokeText(text, x, y - 10);
      context.fillText(text, x, y - 10);
    }
    context.globalAlpha = 1;
  }

  drawTokens() {
    const picture = this.tokens;
    const columns = Math.min(this.names.length, Math.max(2, Math.floor(picture.width / 100)));
    const side = Math.min(220, Math.floor((picture.width - 10 * (columns - 1)) / columns));
    const tall = side;
    const rows = Math.ceil(this.names.length / columns);
    picture.setHeight(rows * (tall + 10) - 10);
    const { context } = picture.clear();
    const { line } = colours();
    const from = Math.max(0, this.selected - 24);
    const steps = this.trail.slice(from, this.selected + 1);
    for (const [token, name] of this.names.entries()) {
      const left = (token % columns) * (side + 10);
      const top = Math.floor(token / columns) * (tall + 10);
      const plane = this.lens.tokens[token];
      const place = this.placer(plane, left, top, side, tall);
      context.strokeStyle = line;
      context.lineWidth = 1;
      context.beginPath();
      context.roundRect(left + 0.5, top + 0.5, side - 1, tall - 1, 6);
      context.stroke();
      this.drawCloud(context, plane, place, 1.5);
      this.drawTrail(context, steps.map((step) => place(step.places[token])), steps.length - 1, 3, 1.25);
      note(context, name, left + 8, top + 17, "left");
    }
  }

  drawNumbers() {
    const picture = this.numbers;
    const rows = this.names.length;
    const columns = this.lens.width;
    const tall = Math.max(6, Math.min(22, 220 / rows));
    picture.setHeight(Math.round(rows * tall));
    const { context, width, height } = picture.clear();
    const step = this.trail[this.selected];
    if (!step?.numbers) return;
    const { low, high, middle } = colours().scale;
    const image = new ImageData(columns, rows);
    for (let i = 0; i < rows * columns; i++) {
      const value = step.numbers[i] / 127;
      const end = value < 0 ? low : high;
      for (let c = 0; c < 3; c++)
        image.data[4 * i + c] = middle[c] + (end[c] - middle[c]) * Math.abs(value);
      image.data[4 * i + 3] = 255;
    }
    drawPixels(context, image, 0, 0, width, height);
    context.fillStyle = colours().paper;
    for (let row = 1; row < rows; row++) context.fillRect(0, Math.round((row * height) / rows), width, 1);
  }
}

/** A small text that stays legible over points and lines. */
function note(context, text, x, y, align) {
  context.font = "12px system-ui, sans-serif";
  context.textAlign = align;
  context.lineWidth = 4;
  context.lineJoin = "round";
  context.strokeStyle = colours().field;
  context.fillStyle = colours().soft;
  context.strokeText(text, x, y);
  context.fillText(text, x, y);
}

function disc(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}
