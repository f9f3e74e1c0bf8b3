// What tokens mean: bytes of text, tokens of a byte-level BPE, numbers, or squares of pixels.

const WORDS =
  /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

class Vocabulary {
  constructor(described) {
    Object.assign(this, described);
    if (!this.bpe) return;
    this.byText = new Map();
    for (const [token, text] of this.bpe.tokens.entries())
      if (text.length === 1 && !this.byText.has(text)) this.byText.set(text, token);
    this.ranks = new Map();
    for (const [rank, [left, right, joined]] of this.bpe.merges.entries())
      this.ranks.set(left * this.size + right, { rank, joined });
  }

  /** Why text cannot be typed; empty if it can. */
  get refused() {
    return this.bpe ? this.bpe.refused : "";
  }

  /** The tokens that the network reads for a beginning, which may be empty. */
  begin(tokens) {
    return this.startWritten && tokens.length ? tokens : [this.start, ...tokens];
  }

  /** The tokens of a typed text. Throws an Error that says what is wrong with it. */
  encode(text) {
    if (this.kind === "numbers") return this.encodeNumbers(text);
    if (text && this.refused) throw new Error(`This page cannot read text: ${this.refused}.`);
    const known = this.alphabet.length ? new Set(this.alphabet) : null;
    for (const character of text) {
      const bytes = new TextEncoder().encode(character);
      if (known && !bytes.every((byte) => known.has(byte)))
        throw new Error(`“${character}” does not occur in the training text; leave it out.`);
    }
    if (!this.bpe) return [...new TextEncoder().encode(text)];
    return (text.match(WORDS) ?? []).flatMap((word) => this.encodeWord(word));
  }

  encodeNumbers(text) {
    const words = text.split(/\s+/).filter(Boolean);
    for (const word of words)
      if (!/^\d{1,8}$/.test(word) || Number(word) >= this.writable)
        throw new Error(`“${word}”: must be a number 0 to ${this.writable - 1}.`);
    return words.map(Number);
  }

  /** Merge the bytes of a word, the pair that was learned first, first. */
  encodeWord(word) {
    const bytes = new TextEncoder().encode(word);
    const tokens = Array.from(bytes, (byte) => this.byText.get(String.fromCharCode(byte)));
    for (;;) {
      let best = null;
      for (let i = 0; i + 1 < tokens.length; i++) {
        const found = this.ranks.get(tokens[i] * this.size + tokens[i + 1]);
        if (found && (!best || found.rank < best.rank)) best = { ...found, place: i };
      }
      if (!best) return tokens;
      tokens.splice(best.place, 2, best.joined);
    }
  }

  /** The bytes of a token of text. */
  bytes(token) {
    if (!this.bpe) return new Uint8Array([token]);
    return Uint8Array.from(this.bpe.tokens[token], (character) => character.charCodeAt(0));
  }

  /** A decoder of tokens that come one by one: the text that each completes. */
  stream() {
    if (this.kind === "numbers") return (token) => `${token} `;
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return (token) => decoder.decode(this.bytes(token), { stream: true });
  }

  /** A token as it is listed: spaces, line ends and single bytes become visible. */
  label(token) {
    if (this.kind === "numbers") return String(token);
    const bytes = this.bytes(token);
    const text = new TextDecoder().decode(bytes);
    if (text.includes("\ufffd"))
      return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const shown = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };
    return text.replace(/[ \n\t\r]/g, (one) => shown[one]).replace(/\p{Cc}/gu, "�");
  }

  /** The class token of an image: of the class with this number, or one at random. */
  classToken(number, random) {
    if (number !== null) return this.writable + number;
    const total = this.classCounts.reduce((sum, count) => sum + count, 0);
    let rest = random.next() * total;
    const found = this.classCounts.findIndex((count) => (rest -= count) < 0);
    return this.writable + Math.max(0, found);
  }

  // ------------------------------------------------------------------------------------ images

  /** Tokens per row of an image, and rows of tokens. */
  get columns() {
    return this.image.width / this.image.patch;
  }

  get rows() {
    return this.image.height / this.image.patch;
  }

  /** The levels of the pixels of a token, in raster order. */
  patchLevels(token) {
    const { levels, patch } = this.image;
    const found = new Array(patch * patch);
    for (let i = found.length - 1; i >= 0; i--) {
      found[i] = token % levels;
      token = Math.floor(token / levels);
    }
    return found;
  }

  /** The token of the square of pixels at a place of an image of levels. */
  patchToken(image, place) {
    const { levels, patch, width } = this.image;
    const top = Math.floor(place / this.columns) * patch;
    const left = (place % this.columns) * patch;
    let token = 0;
    for (let i = 0; i < patch * patch; i++)
      token = token * levels + image[(top + Math.floor(i / patch)) * width + left + (i % patch)];
    return token;
  }

  /** Write the levels of a token into an image. */
  placePatch(image, place, token) {
    const { patch, width } = this.image;
    const top = Math.floor(place / this.columns) * patch;
    const left = (place % this.columns) * patch;
    for (const [i, level] of this.patchLevels(token).entries())
      image[(top + Math.floor(i / patch)) * width + left + (i % patch)] = level;
  }

  /** Red, green and blue of a level. */
  colour(level) {
    const { levels, palette, darkInk } = this.image;
    if (palette.length) return darkInk ? palette[level].map((one) => 255 - one) : palette[level];
    let grey = Math.round((level * 255) / (levels - 1));
    if (levels === 2) grey = 255 - grey; // ink is dark
    if (darkInk) grey = 255 - grey;
    return [grey, grey, grey];
  }
}
