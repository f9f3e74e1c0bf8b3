// Numbers from base64, and the operations of the network on rows of them, contiguous in memory.

/** Bytes of a base64 text. */
function decodeBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** Numbers of 32 bits from base64. */
function decodeFloats(text) {
  return new Float32Array(decodeBase64(text).buffer);
}

/** The value of each number of 16 bits: 1 bit of sign, 5 of exponent, 10 of fraction. */
function halfTable() {
  const table = new Float32Array(65536);
  for (let code = 0; code < 65536; code++) {
    const exponent = (code >> 10) & 31;
    const fraction = code & 1023;
    const sign = code & 32768 ? -1 : 1;
    if (exponent === 0) table[code] = (sign * fraction) / 2 ** 24;
    else if (exponent === 31) table[code] = fraction ? NaN : sign * Infinity;
    else table[code] = sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return table;
}

/** Every tensor of the page as numbers of 32 bits, by name. */
function readTensors(entries, bytes) {
  const halves = entries.some((entry) => entry.type === "f16") ? halfTable() : null;
  const tensors = new Map();
  for (const entry of entries) {
    const count = entry.shape.reduce((product, size) => product * size, 1);
    if (entry.type === "f32") {
      tensors.set(entry.name, new Float32Array(bytes.buffer, entry.start, count));
      continue;
    }
    const values = new Float32Array(count);
    if (entry.type === "f16") {
      const stored = new Uint16Array(bytes.buffer, entry.start, count);
      for (let i = 0; i < count; i++) values[i] = halves[stored[i]];
    } else {
      const stored = new Int8Array(bytes.buffer, entry.start, count);
      const scale = new Float32Array(bytes.buffer, entry.scale, entry.shape[0]);
      const columns = entry.shape[1];
      for (let i = 0; i < count; i++) values[i] = stored[i] * scale[Math.floor(i / columns)];
    }
    tensors.set(entry.name, values);
  }
  return tensors;
}

/** Sum of products of two rows. */
function dot(x, at, weight, w, inner) {
  let sum = 0;
  for (let i = 0; i < inner; i++) sum += weight[w + i] * x[at + i];
  return sum;
}

/** y (rows, outer) = x (rows, inner) times the transpose of weight (outer, inner), plus bias. */
function linear(x, rows, inner, outer, weight, bias, y) {
  const blocked = rows - (rows % 3);
  for (let row = 0; row < blocked; row += 3) linearOfThree(x, row, inner, outer, weight, y);
  for (let row = blocked; row < rows; row++) linearOfOne(x, row, inner, outer, weight, y);
  if (bias)
    for (let row = 0; row < rows; row++)
      for (let out = 0; out < outer; out++) y[row * outer + out] += bias[out];
  return y;
}

/** Three rows, three columns at once: each number that is read serves three products. */
function linearOfThree(x, row, inner, outer, weight, y) {
  const [a, b, c] = [row * inner, (row + 1) * inner, (row + 2) * inner];
  const [p, q, r] = [row * outer, (row + 1) * outer, (row + 2) * outer];
  let out = 0;
  for (; out + 2 < outer; out += 3) {
    const w0 = out * inner;
    const w1 = w0 + inner;
    const w2 = w1 + inner;
    let a0 = 0, a1 = 0, a2 = 0;
    let b0 = 0, b1 = 0, b2 = 0;
    let c0 = 0, c1 = 0, c2 = 0;
    for (let i = 0; i < inner; i++) {
      const v0 = weight[w0 + i];
      const v1 = weight[w1 + i];
      const v2 = weight[w2 + i];
      const xa = x[a + i];
      const xb = x[b + i];
      const xc = x[c + i];
      a0 += v0 * xa;
      a1 += v1 * xa;
      a2 += v2 * xa;
      b0 += v0 * xb;
      b1 += v1 * xb;
      b2 += v2 * xb;
      c0 += v0 * xc;
      c1 += v1 * xc;
      c2 += v2 * xc;
    }
    y[p + out] = a0;
    y[p + out + 1] = a1;
    y[p + out + 2] = a2;
    y[q + out] = b0;
    y[q + out + 1] = b1;
    y[q + out + 2] = b2;
    y[r + out] = c0;
    y[r + out + 1] = c1;
    y[r + out + 2] = c2;
  }
  for (; out < outer; out++) {
    y[p + out] = dot(x, a, weight, out * inner, inner);
    y[q + out] = dot(x, b, weight, out * inner, inner);
    y[r + out] = dot(x, c, weight, out * inner, inner);
  }
}

/** One row, four columns at once. */
function linearOfOne(x, row, inner, outer, weight, y) {
  const a = row * inner;
  let out = 0;
  for (; out + 3 < outer; out += 4) {
    const w0 = out * inner;
    const w1 = w0 + inner;
    const w2 = w1 + inner;
    const w3 = w2 + inner;
    let s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (let i = 0; i < inner; i++) {
      const value = x[a + i];
      s0 += weight[w0 + i] * value;
      s1 += weight[w1 + i] * value;
      s2 += weight[w2 + i] * value;
      s3 += weight[w3 + i] * value;
    }
    const place = row * outer + out;
    y[place] = s0;
    y[place + 1] = s1;
    y[place + 2] = s2;
    y[place + 3] = s3;
  }
  for (; out < outer; out++) y[row * outer + out] = dot(x, a, weight, out * inner, inner);
}

const GELU_REACH = 7;
const GELU_CELLS = 256; // per unit
/** Values and slopes of GELU, x times the normal distribution function, on a grid. */
const GELU_TABLE = (() => {
  const size = 2 * GELU_REACH * GELU_CELLS + 1;
  const values = new Float64Array(size);
  const slopes = new Float64Array(size);
  for (let i = 0; i < size; i++) {
    const x = i / GELU_CELLS - GELU_REACH;
    const density = Math.exp(-0.5 * x * x) / Math.sqrt(2 * Math.PI);
    let term = Math.abs(x); // |x| + |x|^3/3 + |x|^5/(3*5) + ..., times the density
    let sum = 0;
    for (let n = 1; term > 1e-18 * sum; n += 2) {
      sum += term;
      term *= (x * x) / (n + 2);
    }
    const below = 0.5 + Math.sign(x) * density * sum;
    values[i] = x * below;
    slopes[i] = below + x * density;
  }
  return { values, slopes };
})();

/** GELU of the first `count` numbers, in place; cubic between the points of the table. */
function gelu(x, count) {
  const { values, slopes } = GELU_TABLE;
  for (let i = 0; i < count; i++) {
    const value = x[i];
    if (value >= GELU_REACH) continue;
    if (value <= -GELU_REACH) {
      x[i] = 0;
      continue;
    }
    const place = (value + GELU_REACH) * GELU_CELLS;
    const cell = Math.floor(place);
    const t = place - cell;
    const s = 1 - t;
    const bend = (slopes[cell] * s - slopes[cell + 1] * t) / GELU_CELLS;
    x[i] =
      s * s * (1 + 2 * t) * values[cell] + t * t * (1 + 2 * s) * values[cell + 1] + s * t * bend;
  }
}

/** Scale every row to RMS 1, then by the weight if there is one. */
function rmsNorm(x, rows, width, epsilon, weight, y) {
  for (let row = 0; row < rows; row++) {
    const start = row * width;
    let sum = 0;
    for (let i = 0; i < width; i++) sum += x[start + i] * x[start + i];
    const scale = 1 / Math.sqrt(sum / width + epsilon);
    for (let i = 0; i < width; i++) y[start + i] = x[start + i] * scale * (weight ? weight[i] : 1);
  }
}

function sigmoid(x) {
  return 1 / (1 + Math.exp(-x));
}
