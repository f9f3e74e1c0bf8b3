// Sampling of tokens, and the record of what the memory was and expected after each.

/** Uniform numbers in [0, 1) from a seed (a linear congruential generator and a mix of its bits). */
class Random {
  constructor(seed) {
    this.state = seed >>> 0;
  }

  next() {
    this.state = (Math.imul(this.state, 1664525) + 1013904223) >>> 0;
    let bits = this.state;
    bits = Math.imul(bits ^ (bits >>> 16), 0x45d9f3b);
    bits = Math.imul(bits ^ (bits >>> 15), 0x2c1b3c6d);
    return ((bits ^ (bits >>> 16)) >>> 0) / 2 ** 32;
  }
}

/** Probabilities of logits divided by a temperature above 0. */
function softmax(logits, temperature = 1) {
  let largest = -Infinity;
  for (const value of logits) if (value > largest) largest = value;
  const found = new Float64Array(logits.length);
  let total = 0;
  for (let i = 0; i < found.length; i++) {
    found[i] = Math.exp((logits[i] - largest) / temperature);
    total += found[i];
  }
  for (let i = 0; i < found.length; i++) found[i] /= total;
  return found;
}

/** Numbers of the largest values, the largest first; of equal ones the earlier. */
function largestOf(values, count) {
  const found = [];
  for (let i = 0; i < values.length; i++) {
    if (found.length === count && values[i] <= values[found[count - 1]]) continue;
    let place = found.length;
    while (place && values[i] > values[found[place - 1]]) place--;
    found.splice(place, 0, i);
    if (found.length > count) found.pop();
  }
  return found;
}

/** One token from the logits of those that may be written. Temperature 0 takes the likeliest. */
function sampleToken(logits, { temperature, topK }, random) {
  if (temperature === 0) return largestOf(logits, 1)[0];
  const shares = softmax(logits, temperature);
  const threshold = random.next();
  const choice = topK && topK < logits.length ? largestOf(logits, topK) : logits.keys();
  let total = 0;
  if (topK && topK < logits.length) for (const token of choice) total += shares[token];
  else total = 1;
  let sum = 0;
  let last = 0;
  for (const token of choice) {
    if (shares[token] === 0) continue;
    sum += shares[token];
    last = token;
    if (sum > threshold * total) return token;
  }
  return last; // rounding left the threshold beyond the sum
}

const SHOWN_CHOICES = 8;
const NUMBERS_BYTES = 2 ** 26; // of memories that are kept to be shown whole

/** Several sequences that are read and written at once, and what happened at each step. */
class Rollout {
  /**
   * @param begins tokens to read first: one list for all sequences, or one each, equally long.
   * @param count sequences that are written.
   * @param kept steps that are kept; older ones are dropped.
   */
  constructor({ network, lens, writable, begins, count, kept, random }) {
    Object.assign(this, { network, lens, writable, count, kept, random });
    this.whole = Math.max(1, Math.floor(NUMBERS_BYTES / (count * network.memorySize)));
    this.queue = begins;
    this.read = 0;
    this.rows = begins.length;
    this.memory = network.emptyMemory(this.rows);
    this.logits = null;
    this.trails = Array.from({ length: count }, () => []);
    this.dropped = 0; // steps at the start that are no longer kept
  }

  get reading() {
    return this.read < this.queue[0].length;
  }

  /** Tokens read and written so far. */
  get length() {
    return this.dropped + this.trails[0].length;
  }

  /** Read the next token of the beginning, or sample one; returns a token per sequence. */
  advance(options) {
    const given = this.reading;
    let tokens;
    if (given) {
      tokens = this.queue.map((begin) => begin[this.read]);
      this.read++;
    } else {
      this.fork();
      tokens = [];
      for (let row = 0; row < this.rows; row++)
        tokens.push(sampleToken(this.choices(row), options, this.random));
    }
    const before = this.logits;
    this.memory = this.network.step(this.memory, tokens);
    this.logits = this.network.predict(this.memory, this.rows);
    const steps = tokens.map((token, row) => this.describe(token, row, before, given));
    for (const [row, trail] of this.trails.entries()) {
      trail.push(steps[this.rows === 1 ? 0 : row]);
      if (trail.length > this.whole) trail[trail.length - 1 - this.whole].numbers = null;
    }
    if (this.trails[0].length > this.kept) {
      for (const trail of this.trails) trail.shift();
      this.dropped++;
    }
    return tokens;
  }

  /** Give every sequence a memory of its own, after a beginning that they share. */
  fork() {
    if (this.rows === this.count) return;
    const size = this.network.memorySize;
    const memory = new Float32Array(this.count * size);
    const logits = new Float32Array(this.count * this.network.vocabSize);
    for (let row = 0; row < this.count; row++) {
      memory.set(this.memory, row * size);
      logits.set(this.logits, row * this.network.vocabSize);
    }
    this.memory = memory;
    this.logits = logits;
    this.rows = this.count;
  }

  /** The logits of the tokens that a sequence may go on with. */
  choices(row, logits = this.logits) {
    const start = row * this.network.vocabSize;
    return logits.subarray(start, start + this.writable);
  }

  /** What is known after a token: where its memory lies, and what that expects next. */
  describe(token, row, before, given) {
    const size = this.network.memorySize;
    const memory = this.memory.subarray(row * size, (row + 1) * size);
    const shares = softmax(this.choices(row));
    if (Number.isNaN(shares[0])) throw new Error("the network's numbers are no longer finite");
    const expected = before && token < this.writable ? softmax(this.choices(row, before)) : null;
    return {
      token,
      given,
      share: expected ? expected[token] : null,
      expects: largestOf(shares, SHOWN_CHOICES).map((one) => ({ token: one, share: shares[one] })),
      ...this.lens.look(memory),
    };
  }
}
