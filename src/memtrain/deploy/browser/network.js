// The recurrent network: memory and token -> next memory -> logits of the next token.
// Names and orders are those of memtrain's PyTorch modules. Rows of all arrays are contiguous.

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

/** Pre-norm Transformer blocks with rotary positions, and a last norm. */
class Stack {
  constructor(shape, prefix, network) {
    Object.assign(this, shape);
    this.inner = this.heads * this.headDim;
    this.epsilon = network.epsilon;
    this.blocks = [];
    for (let layer = 0; layer < this.layers; layer++) {
      const at = (name) => network.tensor(`${prefix}.blocks.${layer}.${name}`);
      this.blocks.push({
        attentionNorm: at("attention_norm.weight"),
        projectIn: at("attention.project_in.weight"),
        projectOut: at("attention.project_out.weight"),
        mlpNorm: at("mlp_norm.weight"),
        up: at("mlp.0.weight"),
        upBias: at("mlp.0.bias"),
        down: at("mlp.2.weight"),
        downBias: at("mlp.2.bias"),
      });
    }
    this.norm = network.tensor(`${prefix}.norm.weight`);
    this.room = new Map();
  }

  /** An array to compute in, kept for the next call. */
  scratch(name, size) {
    let found = this.room.get(name);
    if (!found || found.length < size) this.room.set(name, (found = new Float32Array(size)));
    return found;
  }

  /** Cosines and sines of the angles of positions, (length, rotated / 2) each. */
  angles(length) {
    const pairs = this.rotated / 2;
    if (this.cosines && this.cosines.length >= length * pairs) return;
    this.cosines = new Float32Array(length * pairs);
    this.sines = new Float32Array(length * pairs);
    for (let place = 0; place < length * pairs; place++) {
      const position = Math.floor(place / pairs);
      const angle = position / this.base ** ((2 * (place % pairs)) / this.rotated);
      this.cosines[place] = Math.cos(angle);
      this.sines[place] = Math.sin(angle);
    }
  }

  /** Rotate the pairs (i, i + half) of a head by the angles of its position. */
  rotate(x, start, position) {
    const half = this.headDim / 2;
    const pairs = this.rotated / 2;
    for (let i = 0; i < pairs; i++) {
      const cosine = this.cosines[position * pairs + i];
      const sine = this.sines[position * pairs + i];
      const left = x[start + i];
      const right = x[start + half + i];
      x[start + i] = left * cosine - right * sine;
      x[start + half + i] = right * cosine + left * sine;
    }
  }

  /** Run sequences x (count, length, width), which is overwritten; returns the positions
   * first..last-1 of each, normalized: (count, last - first, width). */
  forward(x, count, length, first, last, causal) {
    const { width, inner } = this;
    const rows = count * length;
    const kept = last - first;
    const normed = this.scratch("normed", rows * width);
    const update = this.scratch("update", rows * width);
    for (const [layer, block] of this.blocks.entries()) {
      rmsNorm(x, rows, width, this.epsilon, block.attentionNorm, normed);
      const all = layer < this.layers - 1;
      const mixed = this.attend(normed, count, length, block, causal, all ? 0 : first, all ? length : last);
      let active = rows;
      if (!all) {
        active = count * kept; // nothing reads the other positions after the last attention
        for (let n = 0; n < count; n++) {
          const from = (n * length + first) * width;
          x.copyWithin(n * kept * width, from, from + kept * width);
        }
      }
      linear(mixed, active, inner, width, block.projectOut, null, update);
      for (let i = 0; i < active * width; i++) x[i] += update[i];
      rmsNorm(x, active, width, this.epsilon, block.mlpNorm, normed);
      const hidden = this.scratch("hidden", rows * 4 * width);
      linear(normed, active, width, 4 * width, block.up, block.upBias, hidden);
      gelu(hidden, active * 4 * width);
      linear(hidden, active, 4 * width, width, block.down, block.downBias, update);
      for (let i = 0; i < active * width; i++) x[i] += update[i];
    }
    rmsNorm(x, count * kept, width, this.epsilon, this.norm, x);
    return x;
  }

  /** Attention from the positions first..last-1 to all, or, causal, to those before them. */
  attend(x, count, length, block, causal, first, last) {
    const { inner, heads, headDim, width } = this;
    const joint = 3 * inner;
    const qkv = this.scratch("qkv", count * length * joint);
    const mixed = this.scratch("mixed", count * length * inner);
    const weights = this.scratch("weights", length);
    this.angles(length);
    linear(x, count * length, width, joint, block.projectIn, null, qkv);
    for (let row = 0; row < count * length; row++)
      for (let head = 0; head < 2 * heads; head++)
        this.rotate(qkv, row * joint + head * headDim, row % length);
    const scale = 1 / Math.sqrt(headDim);
    let out = 0;
    for (let n = 0; n < count; n++) {
      for (let query = first; query < last; query++) {
        const seen = causal ? query + 1 : length;
        for (let head = 0; head < heads; head++) {
          const q = (n * length + query) * joint + head * headDim;
          let largest = -Infinity;
          for (let key = 0; key < seen; key++) {
            const k = (n * length + key) * joint + inner + head * headDim;
            let sum = 0;
            for (let i = 0; i < headDim; i++) sum += qkv[q + i] * qkv[k + i];
            weights[key] = sum * scale;
            if (weights[key] > largest) largest = weights[key];
          }
          let total = 0;
          for (let key = 0; key < seen; key++) {
            weights[key] = Math.exp(weights[key] - largest);
            total += weights[key];
          }
          for (let i = 0; i < headDim; i++) mixed[out + i] = 0;
          for (let key = 0; key < seen; key++) {
            const v = (n * length + key) * joint + 2 * inner + head * headDim;
            const weight = weights[key] / total;
            for (let i = 0; i < headDim; i++) mixed[out + i] += weight * qkv[v + i];
          }
          out += headDim;
        }
      }
    }
    return mixed;
  }
}

/** Cell and readout. A memory is M tokens of width D; several sequences are computed at once. */
class Network {
  constructor(shape, bytes) {
    this.tensors = readTensors(shape.tensors, bytes);
    this.epsilon = shape.epsilon;
    this.kind = shape.cell.kind;
    this.memoryTokens = shape.cell.memoryTokens;
    this.memoryDim = shape.cell.memoryDim;
    this.memorySize = this.memoryTokens * this.memoryDim;
    this.vocabSize = shape.readout.vocabSize;
    this.layers = shape.cell.layers;
    this.causal = shape.readout.causal;
    if (this.kind === "transformer") this.stack = new Stack(shape.cell.stack, "cell.stack", this);
    this.decoder = new Stack(shape.readout.stack, "readout.stack", this);
    this.embedding = this.tensor("cell.embedding.weight");
  }

  tensor(name) {
    const found = this.tensors.get(name);
    if (!found) throw new Error(`the page has no weights named ${name}`);
    return found;
  }

  /** The memories of having read nothing. */
  emptyMemory(count) {
    return new Float32Array(count * this.memorySize);
  }

  /** Read one token per sequence: the next memories. */
  step(memory, tokens) {
    if (this.kind === "transformer") return this.transformerStep(memory, tokens);
    if (this.kind === "mlp") return this.mlpStep(memory, tokens);
    return this.gatedStep(memory, tokens);
  }

  transformerStep(memory, tokens) {
    const count = tokens.length;
    const { memoryTokens, memoryDim, stack } = this;
    const { width } = stack;
    const length = memoryTokens + 1;
    const x = new Float32Array(count * length * width);
    const inside = this.project(memory, count * memoryTokens, memoryDim, width, "cell.from_memory");
    for (let n = 0; n < count; n++) {
      const from = n * memoryTokens * width;
      x.set(inside.subarray(from, from + memoryTokens * width), n * length * width);
      x.set(
        this.embedding.subarray(tokens[n] * width, (tokens[n] + 1) * width),
        (n * length + memoryTokens) * width,
      );
    }
    const y = stack.forward(x, count, length, 0, memoryTokens, false);
    const next = this.project(y, count * memoryTokens, width, memoryDim, "cell.to_memory");
    return this.normalized(next, count);
  }

  mlpStep(memory, tokens) {
    const count = tokens.length;
    const size = this.memorySize;
    const dim = this.memoryDim;
    let inner = size + dim;
    let x = new Float32Array(count * inner);
    for (let n = 0; n < count; n++) {
      x.set(memory.subarray(n * size, (n + 1) * size), n * inner);
      x.set(this.embedding.subarray(tokens[n] * dim, (tokens[n] + 1) * dim), n * inner + size);
    }
    for (let layer = 0; layer < this.layers; layer++) {
      const bias = this.tensor(`cell.mlp.${2 * layer}.bias`);
      const y = new Float32Array(count * bias.length);
      linear(x, count, inner, bias.length, this.tensor(`cell.mlp.${2 * layer}.weight`), bias, y);
      if (layer < this.layers - 1) gelu(y, y.length);
      x = y;
      inner = bias.length;
    }
    return this.normalized(x, count);
  }

  /** A GRU, or an LSTM, whose layers have two memory tokens each: h and c. */
  gatedStep(memory, tokens) {
    const count = tokens.length;
    const { memoryTokens, memoryDim: dim, memorySize: size } = this;
    const lstm = this.kind === "lstm";
    const gates = lstm ? 4 : 3;
    const next = new Float32Array(count * size);
    const below = new Float32Array(count * dim);
    const state = new Float32Array(count * dim);
    const input = new Float32Array(count * gates * dim);
    const own = new Float32Array(count * gates * dim);
    for (let n = 0; n < count; n++)
      below.set(this.embedding.subarray(tokens[n] * dim, (tokens[n] + 1) * dim), n * dim);
    for (let layer = 0; layer < memoryTokens / (lstm ? 2 : 1); layer++) {
      const first = layer * (lstm ? 2 : 1) * dim; // of the layer's states in a memory
      const at = (name) => this.tensor(`cell.layers.${layer}.${name}`);
      for (let n = 0; n < count; n++) {
        const from = n * size + first;
        state.set(memory.subarray(from, from + dim), n * dim);
      }
      linear(below, count, dim, gates * dim, at("weight_ih"), at("bias_ih"), input);
      linear(state, count, dim, gates * dim, at("weight_hh"), at("bias_hh"), own);
      for (let n = 0; n < count; n++) {
        for (let i = 0; i < dim; i++) {
          const g = n * gates * dim + i;
          const place = n * size + first + i;
          if (lstm) {
            const keep = sigmoid(input[g + dim] + own[g + dim]) * memory[place + dim];
            const added = Math.tanh(input[g + 2 * dim] + own[g + 2 * dim]);
            const c = keep + sigmoid(input[g] + own[g]) * added;
            next[place + dim] = c;
            next[place] = sigmoid(input[g + 3 * dim] + own[g + 3 * dim]) * Math.tanh(c);
          } else {
            const reset = sigmoid(input[g] + own[g]);
            const update = sigmoid(input[g + dim] + own[g + dim]);
            const fresh = Math.tanh(input[g + 2 * dim] + reset * own[g + 2 * dim]);
            next[place] = (1 - update) * fresh + update * memory[place];
          }
          below[n * dim + i] = next[place];
        }
      }
    }
    return next;
  }

  /** The logits of the next token of each sequence: (count, vocabSize). */
  predict(memory, count) {
    const { memoryTokens, memoryDim, decoder, vocabSize } = this;
    const { width } = decoder;
    const rows = count * memoryTokens;
    const inside = this.project(memory, rows, memoryDim, width, "readout.from_memory");
    const x = inside === memory ? memory.slice() : inside;
    const y = decoder.forward(x, count, memoryTokens, memoryTokens - 1, memoryTokens, this.causal);
    const bias = this.tensors.get("readout.head.bias") ?? null;
    const logits = new Float32Array(count * vocabSize);
    return linear(y, count, width, vocabSize, this.tensor("readout.head.weight"), bias, logits);
  }

  /** A linear map without bias, or x itself where the model has none. */
  project(x, rows, inner, outer, name) {
    const weight = this.tensors.get(`${name}.weight`);
    if (!weight) return x;
    return linear(x, rows, inner, outer, weight, null, new Float32Array(rows * outer));
  }

  /** Memory tokens scaled to RMS 1. */
  normalized(x, count) {
    const next = new Float32Array(count * this.memorySize);
    rmsNorm(x, count * this.memoryTokens, this.memoryDim, this.epsilon, null, next);
    return next;
  }
}
