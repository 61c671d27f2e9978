// What the page computes, without a document: read, stack, filter, sort, zoom. The page runs it, and so does a test under node.
const model = (() => {
  "use strict";
  const PHASES = ["forward", "backward", "update"];
  const NO_LAYER = 255;
  const MAX_LAYERS = 12;
  const COLLATOR = new Intl.Collator("en", { numeric: true }); // blocks.2 is before blocks.10

  // -- the data ------------------------------------------------------------------------------------------------------------------

  function decode(raw) {
    const { steps, buffers: b, loops } = raw, text = i => raw.strings[i];
    const stepName = i => text(steps.name[i]);
    return {
      ...raw, b,
      constant: raw.kinds.indexOf("constant"),
      step: i => ({
        name: stepName(i), primitive: text(steps.primitive[i]), source: text(steps.source[i]), phase: PHASES[steps.phase[i]],
        loops: loops.filter(loop => loop.first <= i && i <= loop.last).map(loop => loop.text),
      }),
      // Most buffers have the name of the step that writes them.
      buffer: i => ({
        name: text(b.name[i]) || stepName(b.start[i]),
        bytes: b.bytes[i], start: b.start[i], end: b.end[i], kind: raw.kinds[b.kind[i]], phase: PHASES[b.phase[i]],
        type: text(b.type[i]), owner: text(b.owner[i]), function: text(b.function[i]), source: text(b.source[i]),
        primitive: text(b.primitive[i]), region: text(b.region[i]), loop: text(b.loop[i]), stacked: text(b.stacked[i]),
      }),
      smallChange: raw.small && raw.small.change,
    };
  }

  // -- layers: which buffers are one color -----------------------------------------------------------------------------------------

  const family = owner => owner.replace(/([.[])\d+(?=[.\]]|$)/g, "$1*");
  const isBoundary = kind => kind === "state" || kind === "argument" || kind === "output";

  // What enters and leaves the program is one layer of each kind, so that colors belong to what changes.
  const KEYS = {
    owner: (kind, owner) => isBoundary(kind) ? kind + "s" : owner || "unknown",
    merged: (kind, owner) => isBoundary(kind) ? kind + "s" : (family(owner) || "unknown") + " · " + kind,
    kind: kind => kind,
    line: (kind, source) => isBoundary(kind) ? kind + "s" : source || "unknown",
  };

  // The key of each buffer; a constant has none.
  function keysOf(p, mode) {
    const column = p.b[mode === "line" ? "source" : "owner"], known = new Map();
    return Array.from({ length: p.num_buffers }, (_, i) => {
      const kind = p.b.kind[i], id = column[i] * p.kinds.length + kind;
      if (kind === p.constant) return null;
      if (!known.has(id)) known.set(id, KEYS[mode](p.kinds[kind], p.strings[column[i]]));
      return known.get(id);
    });
  }

  // By key, the bytes at the peak, and the most bytes at any step.
  function sizesOf(p, keys) {
    const sizes = new Map(), changes = [];
    const at = (i, step, bytes) => changes.push({ key: keys[i], step, bytes });
    for (let i = 0; i < p.num_buffers; i++) {
      if (keys[i] === null) continue;
      if (!sizes.has(keys[i])) sizes.set(keys[i], { atPeak: 0, max: 0, now: 0 });
      sizes.get(keys[i]).atPeak += aliveBytes(p, i, p.peak_step);
      at(i, p.b.start[i], p.b.bytes[i]);
      at(i, p.b.end[i], -p.b.taken[i]);
      at(i, p.b.end[i] + 1, p.b.taken[i] - p.b.bytes[i]);
    }
    changes.sort((a, b) => a.step - b.step || a.bytes - b.bytes); // in a step, what ends is first
    for (const { key, bytes } of changes) {
      const size = sizes.get(key);
      size.now += bytes;
      size.max = Math.max(size.max, size.now);
    }
    return sizes;
  }

  // The layers of one or two profiles: the keys with most bytes, first those at a peak, and one layer for all others.
  function layersBy(profiles, mode) {
    const keys = profiles.map(p => keysOf(p, mode)), sizes = new Map(), visible = new Set();
    profiles.forEach((p, n) => {
      for (const [key, { atPeak, max }] of sizesOf(p, keys[n])) {
        const known = sizes.get(key) || { atPeak: 0, max: 0 };
        sizes.set(key, { atPeak: Math.max(known.atPeak, atPeak), max: Math.max(known.max, max) });
        // A layer that stays below 1 in 200 of the peak would not be visible.
        if (mode === "kind" || 200 * max >= p.peak_bytes) visible.add(key);
      }
    });
    const sorted = (names, size) => names.sort((a, b) => size(sizes.get(b)) - size(sizes.get(a)) || (a < b ? -1 : 1));
    const ranked = sorted([...visible], ({ atPeak, max }) => Math.max(atPeak, max / 2));
    const names = sorted(ranked.slice(0, ranked.length > MAX_LAYERS + 1 ? MAX_LAYERS : MAX_LAYERS + 1), ({ atPeak, max }) => atPeak + max / 1e6);
    const hasOther = sizes.size > names.length || profiles.some(p => p.small);
    const other = hasOther ? names.length : -1;
    const index = new Map(names.map((name, i) => [name, i]));
    const of = keys.map(k => Uint8Array.from(k, key => key === null ? NO_LAYER : index.has(key) ? index.get(key) : other));
    if (hasOther) names.push("other");
    return { mode, names, other, of };
  }

  // By owner, unless the owners do not fit into the layers and merging those that differ in an index shows more.
  function bestMode(profiles) {
    const share = mode => {
      const layers = layersBy(profiles, mode);
      if (layers.other < 0) return 0;
      return Math.max(...profiles.map((p, n) => {
        const { rows, total } = stack(p, layers, n);
        return rows[layers.other][p.peak_step] / Math.max(total[p.peak_step], 1);
      }));
    };
    const byOwner = share("owner");
    return byOwner > 0.2 && share("merged") < byOwner ? "merged" : "owner";
  }

  // -- bytes at each step ----------------------------------------------------------------------------------------------------------

  // A buffer that others replace in place has, in its last step, what is left of it.
  function aliveBytes(p, i, step) {
    if (p.b.start[i] > step || p.b.end[i] < step) return 0;
    return p.b.bytes[i] - (step === p.b.end[i] ? p.b.taken[i] : 0);
  }

  // Bytes at each step: a row for each layer, and their sum.
  function stack(p, layers, n) {
    const rows = layers.names.map(() => new Float64Array(p.num_steps + 1));
    for (let i = 0; i < p.num_buffers; i++) {
      const layer = layers.of[n][i];
      if (layer === NO_LAYER) continue;
      const row = rows[layer];
      row[p.b.start[i]] += p.b.bytes[i];
      row[p.b.end[i]] -= p.b.taken[i];
      row[p.b.end[i] + 1] -= p.b.bytes[i] - p.b.taken[i];
    }
    if (p.smallChange) p.smallChange.forEach((n, step) => { rows[layers.other][step] += n; });
    const total = new Float64Array(p.num_steps);
    for (const row of rows) {
      for (let step = 1; step < row.length; step++) row[step] += row[step - 1];
      for (let step = 0; step < p.num_steps; step++) total[step] += row[step];
    }
    return { rows, total };
  }

  // From bottom to top: what is alive throughout is below what comes and goes, so that the picture has a flat base.
  function stackOrder(stacks, layers) {
    const flatness = layers.names.map((_, k) => {
      let flat = 0;
      for (const { rows } of stacks) {
        let sum = 0, max = 0;
        for (const n of rows[k]) { sum += n; if (n > max) max = n; }
        flat = Math.max(flat, max ? sum / max / rows[k].length : 0);
      }
      return flat;
    });
    const rank = k => k === layers.other ? -1 : isBoundary(layers.names[k].replace(/s$/, "")) ? 2 : flatness[k];
    return layers.names.map((_, k) => k).sort((a, b) => rank(b) - rank(a) || a - b);
  }

  function alive(p, step) {
    const found = [];
    for (let i = 0; i < p.num_buffers; i++) if (p.b.kind[i] !== p.constant && aliveBytes(p, i, step) > 0) found.push(i);
    return found;
  }

  // -- zoom ------------------------------------------------------------------------------------------------------------------------

  // A view is the range of steps from `from` to `to`, excluded; both may be fractions.
  const fullView = n => ({ from: 0, to: Math.max(n, 1) });
  const MIN_VIEW = 4;

  function clamp(view, n) {
    n = Math.max(n, 1);
    const width = Math.min(Math.max(view.to - view.from, Math.min(MIN_VIEW, n)), n);
    const from = Math.min(Math.max((view.from + view.to - width) / 2, 0), n - width);
    return { from, to: from + width };
  }

  // Keeps `center` where it is on the screen. A factor below 1 shows fewer steps.
  function zoom(view, center, factor, n) {
    const width = Math.min(Math.max((view.to - view.from) * factor, Math.min(MIN_VIEW, n)), n);
    const from = center - (center - view.from) * width / (view.to - view.from);
    return clamp({ from, to: from + width }, n);
  }

  const pan = (view, steps, n) => clamp({ from: view.from + steps, to: view.to + steps }, n);
  const isFull = (view, n) => view.to - view.from >= n;

  // For each column of the picture one step, the one with most bytes, so that no peak gets lost between the columns.
  function columns(total, view, num) {
    const steps = new Int32Array(num), scale = (view.to - view.from) / num, last = Math.max(total.length - 1, 0);
    for (let x = 0; x < num; x++) {
      let best = Math.min(Math.floor(view.from + x * scale), last);
      const end = Math.min(Math.ceil(view.from + (x + 1) * scale) - 1, last);
      for (let step = best + 1; step <= end; step++) if (total[step] > total[best]) best = step;
      steps[x] = best;
    }
    return steps;
  }

  // Spans of one phase in the columns of a picture: a column has the phase of most of its steps. XLA moves some operations of one
  // phase into another; a span narrower than `least` columns belongs to the span before it.
  function phaseSpans(phase, view, num, least) {
    const scale = (view.to - view.from) / num, spans = [];
    for (let x = 0; x < num; x++) {
      const count = [0, 0, 0];
      const end = Math.max(Math.ceil(view.from + (x + 1) * scale), Math.floor(view.from + x * scale) + 1);
      for (let step = Math.floor(view.from + x * scale); step < end && step < phase.length; step++) count[phase[step]]++;
      const most = count.indexOf(Math.max(...count)), last = spans[spans.length - 1];
      if (last && last.phase === most) last.to = x + 1;
      else spans.push({ phase: most, from: x, to: x + 1 });
    }
    const joined = [];
    for (const span of spans) {
      const last = joined[joined.length - 1];
      if (last && (span.to - span.from < least || last.phase === span.phase)) last.to = span.to;
      else joined.push(span);
    }
    return joined.map(span => ({ ...span, name: PHASES[span.phase] }));
  }

  // Multiples of 1, 2 or 5 times a power of 10 (steps), or of a power of 2 (bytes), at most `most` of them.
  function ticks(from, to, most, isBytes) {
    let unit = 1;
    for (let k = 0; (to - from) / unit > most; k++) unit = isBytes ? 2 ** (k + 1) : [2, 5, 10][k % 3] * 10 ** Math.floor(k / 3);
    const found = [];
    for (let tick = Math.ceil(from / unit) * unit; tick <= to; tick += unit) found.push(tick);
    return found;
  }

  // -- the list --------------------------------------------------------------------------------------------------------------------

  const SEARCHED = ["name", "type", "owner", "function", "source", "primitive", "region", "loop", "stacked", "kind", "phase"];

  function searchText(p, i) {
    p.searchTexts = p.searchTexts || [];
    const text = () => { const b = p.buffer(i); return SEARCHED.map(key => b[key]).join("\n").toLowerCase(); };
    return p.searchTexts[i] || (p.searchTexts[i] = text());
  }

  // Indices of the buffers: alive at `step` unless it is null, of one of the kinds, in one layer, and with every word of the text.
  function filter(p, { text = "", kinds = null, step = null, layer = null }) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = step === null ? Array.from({ length: p.num_buffers }, (_, i) => i) : alive(p, step);
    return found.filter(i =>
      (!kinds || kinds.has(p.kinds[p.b.kind[i]])) && (!layer || layer.of[i] === layer.index)
      && words.every(word => searchText(p, i).includes(word)));
  }

  // The place of each string in the order of the alphabet.
  function ranks(p) {
    if (!p.ranks) {
      p.ranks = new Int32Array(p.strings.length);
      p.strings.map((_, i) => i).sort((i, j) => COLLATOR.compare(p.strings[i], p.strings[j])).forEach((i, rank) => { p.ranks[i] = rank; });
    }
    return p.ranks;
  }

  // Equal ones are sorted by size, the largest first.
  function sort(p, found, key, descending) {
    const sign = descending ? -1 : 1, column = p.b[key], isText = !["bytes", "start", "kind"].includes(key), order = isText ? ranks(p) : null;
    const value = isText ? i => order[column[i]] : i => column[i];
    return [...found].sort((i, j) => sign * (value(i) - value(j)) || p.b.bytes[j] - p.b.bytes[i] || i - j);
  }

  // -- text ------------------------------------------------------------------------------------------------------------------------

  // As statetx._text.format_bytes writes it, which rounds halves to even: 1280 bytes are 1.2 KiB.
  function formatBytes(n) {
    const sign = n < 0 ? "−" : "";
    let size = Math.abs(n);
    if (size < 1024) return `${sign}${size} B`;
    let unit;
    for (unit of ["KiB", "MiB", "GiB"]) { size /= 1024; if (size < 1024) break; }
    let tenths = Math.round(size * 10);
    if (size * 10 % 1 === 0.5 && tenths % 2) tenths -= 1;
    return `${sign}${(tenths / 10).toFixed(1)} ${unit}`;
  }

  const formatCount = n => n.toLocaleString("en-US");

  function formatShare(part, whole) {
    const share = 100 * part / Math.max(whole, 1);
    return share > 0 && share < 0.5 ? "<1%" : `${Math.round(share)}%`;
  }

  return { decode, family, layersBy, bestMode, stack, stackOrder, alive, aliveBytes, fullView, clamp, zoom, pan, isFull, columns,
    phaseSpans, ticks, filter, sort, formatBytes, formatCount, formatShare, PHASES, MAX_LAYERS };
})();
if (typeof module !== "undefined") module.exports = model;
