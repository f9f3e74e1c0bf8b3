// The recurrent network: memory and token -> next memory -> logits of the next token.
// Names and orders are those of memtrain's PyTorch modules.

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
