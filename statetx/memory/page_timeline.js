// A timeline: bytes alive at each step as stacked bands, with phases and loops below, to zoom and to select a step.
class Timeline {
  constructor(index) {
    this.index = index;
    this.p = profiles[index];
    this.n = this.p.num_steps;
    this.view = model.fullView(this.n);
    this.selected = this.p.peak_step;
    this.pointers = new Map();
    this.lanes = Math.min(Math.max(0, ...this.p.loops.map(loop => loop.depth + 1)), MAX_LANES);
    this.height = PLOT.top + PLOT.height + PLOT.axis + PLOT.phase + this.lanes * PLOT.lane + 8;
    this.build();
  }

  build() {
    this.base = h("canvas");
    this.over = h("canvas");
    this.tip = h("div", { class: "tip", hidden: true });
    this.plot = h("div", {
      class: "plot", tabindex: 0, role: "slider", "aria-label": `Step of the timeline${this.suffix()}`,
      "aria-valuemin": 1, "aria-valuemax": Math.max(this.n, 1), "aria-describedby": "keys",
    }, this.base, this.over, this.tip);
    this.plot.style.height = `${this.height}px`;
    this.legend = h("ul", { class: "legend" });
    this.status = h("p", { class: "status", "aria-live": "polite" });
    const zoom = factor => () => this.setView(model.zoom(this.view, this.center(), factor, this.n));
    const pan = part => () => this.setView(model.pan(this.view, part * (this.view.to - this.view.from), this.n));
    this.reset = button("Reset", "Show all steps", () => this.setView(model.fullView(this.n)));
    this.buttons = h("div", { class: "buttons" },
      button("−", "Zoom out", zoom(2)), button("+", "Zoom in", zoom(0.5)), button("◀", "Earlier", pan(-0.3)),
      button("▶", "Later", pan(0.3)), this.reset, button("Peak", "Select the peak", () => this.select(this.p.peak_step, true)));
    const title = isDouble ? h("h3", {}, `${this.p.label}: `, h("b", {}, formatBytes(this.p.peak_bytes))) : h("h2", {}, "Timeline");
    this.element = h("div", { class: "timeline" }, h("div", { class: "bar-top" }, title, this.buttons), this.plot, this.status, this.legend);
    this.listen();
  }

  suffix() { return this.p.label ? `, ${this.p.label}` : ""; }

  setStack(stack) {
    this.stack = stack;
    this.draw();
    this.showLegend();
  }

  setView(view) {
    this.view = view;
    this.draw();
  }

  center() {
    const at = this.selected + 0.5;
    return this.view.from <= at && at <= this.view.to ? at : (this.view.from + this.view.to) / 2;
  }

  select(step, isShown = false) {
    if (!this.n) return;
    this.selected = Math.min(Math.max(step, 0), this.n - 1);
    const { from, to } = this.view;
    if (isShown && (this.selected < from || this.selected + 1 > to)) {
      const shift = this.selected < from ? this.selected - from : this.selected + 1 - to;
      this.setView(model.pan(this.view, shift + Math.sign(shift) * (to - from) * 0.1, this.n));
    }
    state.active = this.index;
    state.atStep = true;
    this.showLegend();
    timelines.forEach(t => t.drawOver());
    list.changed();
  }

  // Bytes of each layer at the selected step.
  showLegend() {
    const step = this.selected, { rows, total } = this.stack;
    if (!this.n) return;
    const info = this.p.step(step);
    const isPeak = step === this.p.peak_step;
    this.plot.setAttribute("aria-valuenow", step + 1);
    this.plot.setAttribute("aria-valuetext", `step ${step + 1}, ${formatBytes(total[step])}${isPeak ? ", the peak" : ""}, ${info.phase}`);
    const where = [info.phase, info.name, info.primitive, info.source, ...info.loops.map(loop => `in ${loop}`)].filter(Boolean).join(" · ");
    this.status.replaceChildren(h("b", {}, `Step ${formatCount(step + 1)}${isPeak ? " (peak)" : ""}: ${formatBytes(total[step])} alive`), ` ${where}`);
    const shown = layers.names.map((_, k) => k).sort((a, b) => (a === layers.other) - (b === layers.other) || rows[b][step] - rows[a][step]);
    const focused = [...this.legend.children].find(item => item.contains(document.activeElement))?.dataset.layer;
    this.legend.replaceChildren(...shown.map(k => this.legendItem(k, rows[k][step], total[step])));
    if (focused !== undefined) this.legend.querySelector(`[data-layer="${focused}"] button`)?.focus();
  }

  legendItem(k, bytes, total) {
    const isOn = state.layer && state.layer.index === k;
    const toggle = () => {
      state.layer = isOn && state.active === this.index ? null : { index: k };
      state.active = this.index;
      timelines.forEach(t => { t.showLegend(); t.drawOver(); });
      list.changed();
    };
    const show = on => () => { this.hoveredLayer = on ? k : null; this.drawOver(); };
    return h("li", { class: bytes ? "" : "zero", "data-layer": k }, h("button", {
      type: "button", "aria-pressed": isOn ? "true" : "false", title: `${layers.names[k]}: list its buffers`, onclick: toggle,
      onpointerenter: show(true), onpointerleave: show(false),
    }, swatch(k), this.legendName(layers.names[k]), h("b", {}, formatBytes(bytes)), h("span", { class: "dim" }, formatShare(bytes, total))));
  }

  // A name that is too long loses its middle: the end of a path tells it from others.
  legendName(name) {
    const tail = Math.max(name.length - 20, 0);
    return h("span", { class: "name" }, h("span", { class: "head" }, name.slice(0, tail)), h("span", {}, name.slice(tail)));
  }

  // -- coordinates

  get width() { return Math.max(this.plot.clientWidth - PLOT.left - PLOT.right, 20); }
  x(step) { return PLOT.left + (step - this.view.from) / (this.view.to - this.view.from) * this.width; }
  y(bytes) { return PLOT.top + PLOT.height * (1 - bytes / (highest * 1.04)); }
  yTicks() { return model.ticks(0, highest * 1.04, 6, true); }
  yLabel(bytes) { return formatBytes(bytes).replace(".0", ""); }
  stepAt(x) { return this.view.from + (x - PLOT.left) / this.width * (this.view.to - this.view.from); }
  wholeStepAt(x) { return Math.min(Math.max(Math.floor(this.stepAt(x)), 0), this.n - 1); }

  prepare(canvas) {
    const ratio = window.devicePixelRatio || 1, width = this.plot.clientWidth;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(this.height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = `12px ${css("--font")}`;
    context.textBaseline = "middle";
    return context;
  }

  // -- drawing

  draw() {
    if (!this.stack || !this.plot.isConnected) return;
    this.reset.disabled = model.isFull(this.view, this.n);
    const c = this.prepare(this.base);
    PLOT.left = Math.max(...this.yTicks().map(tick => c.measureText(this.yLabel(tick)).width)) + 14;
    this.columns = model.columns(this.stack.total, this.view, Math.ceil(this.width));
    this.drawGrid(c);
    this.drawLayers(c);
    this.drawReserved(c);
    this.drawPhases(c);
    this.drawLoops(c);
    this.drawOver();
  }

  drawGrid(c) {
    const right = PLOT.left + this.width, bottom = this.y(0);
    c.strokeStyle = css("--line");
    c.fillStyle = css("--muted");
    c.lineWidth = 1;
    c.textAlign = "right";
    for (const tick of this.yTicks()) {
      const y = Math.round(this.y(tick)) + 0.5;
      c.beginPath(); c.moveTo(PLOT.left, y); c.lineTo(right, y); c.stroke();
      c.fillText(this.yLabel(tick), PLOT.left - 8, y);
    }
    c.textAlign = "center";
    // Steps count from 1, and a label is at the middle of its step.
    for (const tick of model.ticks(Math.max(this.view.from + 0.5, 1), this.view.to + 0.5, this.width / 75)) {
      const x = this.x(tick - 0.5);
      c.fillText(formatCount(tick), Math.min(x, right - c.measureText(formatCount(tick)).width / 2), bottom + 11);
      c.beginPath(); c.moveTo(x, bottom); c.lineTo(x, bottom + 4); c.stroke();
    }
  }

  // The outline of a band over the columns, given its bottom and top in bytes.
  band(low, high, from = 0, to = this.columns.length) {
    const path = new Path2D();
    path.moveTo(PLOT.left + from, this.y(low[from]));
    for (let x = from; x < to; x++) { path.lineTo(PLOT.left + x, this.y(high[x])); path.lineTo(PLOT.left + x + 1, this.y(high[x])); }
    for (let x = to - 1; x >= from; x--) { path.lineTo(PLOT.left + x + 1, this.y(low[x])); path.lineTo(PLOT.left + x, this.y(low[x])); }
    path.closePath();
    return path;
  }

  drawLayers(c) {
    const low = new Float64Array(this.columns.length);
    this.bottoms = [];
    this.bands = [];
    for (const k of order) {
      const high = low.map((bytes, x) => bytes + this.stack.rows[k][this.columns[x]]);
      this.bottoms[k] = low.slice();
      if (high.some((bytes, x) => bytes > low[x])) {
        const path = this.bands[k] = this.band(low, high);
        c.fillStyle = colorOf(k);
        c.fill(path);
        if (layers.colors[k].hatched) { c.fillStyle = this.hatching(c); c.fill(path); }
        c.strokeStyle = css("--card");
        c.lineWidth = 0.5;
        c.stroke(path);
      }
      low.set(high);
    }
  }

  // Bands beyond the palette have stripes besides the color of an earlier one.
  hatching(c) {
    const tile = h("canvas", { width: 8, height: 8 }), t = tile.getContext("2d");
    t.strokeStyle = css("--card");
    t.globalAlpha = 0.65;
    t.lineWidth = 2;
    for (const shift of [-8, 0, 8]) { t.beginPath(); t.moveTo(shift, 8); t.lineTo(shift + 8, 0); t.stroke(); }
    return c.createPattern(tile, "repeat");
  }

  drawReserved(c) {
    const y = this.y(this.p.peak_bytes), right = PLOT.left + this.width;
    c.strokeStyle = c.fillStyle = css("--ink");
    c.lineWidth = 1;
    c.setLineDash([5, 4]);
    c.beginPath(); c.moveTo(PLOT.left, y); c.lineTo(right, y); c.stroke();
    c.setLineDash([]);
    const x = this.x(this.p.peak_step + 0.5), text = `peak: ${formatBytes(this.p.peak_bytes)} reserved`;
    const isVisible = this.view.from <= this.p.peak_step && this.p.peak_step < this.view.to;
    c.font = `600 12px ${css("--font")}`;
    const half = c.measureText(text).width / 2;
    c.textAlign = "center";
    c.fillText(text, isVisible ? Math.min(Math.max(x, PLOT.left + half), right - half) : PLOT.left + half, y - 13);
    c.font = `12px ${css("--font")}`;
    if (!isVisible) return;
    c.beginPath(); c.moveTo(x - 4.5, y - 6); c.lineTo(x + 4.5, y - 6); c.lineTo(x, y + 1); c.fill();
    c.globalAlpha = 0.55;
    c.setLineDash([2, 3]);
    c.beginPath(); c.moveTo(x, y); c.lineTo(x, this.y(0)); c.stroke();
    c.setLineDash([]);
    c.globalAlpha = 1;
  }

  drawPhases(c) {
    const y = this.y(0) + PLOT.axis + 2, height = PLOT.phase - 4;
    c.textAlign = "center";
    for (const span of model.phaseSpans(this.p.steps.phase, this.view, this.columns.length, Math.max(this.columns.length / 60, 3))) {
      const width = span.to - span.from;
      c.fillStyle = css(`--${span.name}`);
      c.fillRect(PLOT.left + span.from, y, Math.max(width - 1, 1), height);
      c.fillStyle = css("--phase-ink");
      if (c.measureText(span.name).width + 8 < width) c.fillText(span.name, PLOT.left + (span.from + span.to) / 2, y + height / 2 + 0.5);
    }
  }

  drawLoops(c) {
    const top = this.y(0) + PLOT.axis + PLOT.phase + 3;
    c.save();
    c.beginPath(); c.rect(PLOT.left, top - 2, this.width, this.lanes * PLOT.lane + 4); c.clip();
    c.strokeStyle = css("--muted");
    c.textAlign = "center";
    for (const { text, first, last, depth } of this.p.loops) {
      const a = this.x(first), b = this.x(last + 1), y = top + depth * PLOT.lane;
      if (depth >= MAX_LANES || b < PLOT.left || a > PLOT.left + this.width) continue;
      c.beginPath(); c.moveTo(a + 0.5, y); c.lineTo(a + 0.5, y + 5); c.lineTo(b - 0.5, y + 5); c.lineTo(b - 0.5, y); c.stroke();
      const from = Math.max(a, PLOT.left), to = Math.min(b, PLOT.left + this.width);
      const label = [text, text.split(" at ")[0], text.replace(/^(\S+) of ([\d,]+).*/s, "$1 × $2"), text.split(" ")[0]].find(t => c.measureText(t).width + 12 < to - from);
      if (!label) continue;
      const width = c.measureText(label).width + 8;
      c.fillStyle = css("--card");
      c.fillRect((from + to - width) / 2, y, width, 12);
      c.fillStyle = css("--muted");
      c.fillText(label, (from + to) / 2, y + 6);
    }
    c.restore();
  }

  // The layer that changes without the rest: selection, highlight, crosshair, and the range that is dragged.
  drawOver() {
    if (!this.columns || !this.columns.length) return;
    const c = this.prepare(this.over), bottom = this.y(0);
    c.save();
    c.beginPath(); c.rect(PLOT.left, 0, this.width, bottom + PLOT.axis); c.clip();
    this.drawHighlight(c);
    if (this.n) this.mark(c, this.x(this.selected + 0.5), css("--accent"), 2);
    if (this.hover) this.mark(c, this.hover.x, css("--muted"), 1);
    if (this.brush) {
      c.fillStyle = css("--accent");
      c.globalAlpha = 0.22;
      c.fillRect(Math.min(...this.brush), PLOT.top, Math.abs(this.brush[1] - this.brush[0]), PLOT.height);
    }
    c.restore();
  }

  mark(c, x, color, width) {
    c.strokeStyle = c.fillStyle = color;
    c.lineWidth = width;
    c.beginPath(); c.moveTo(x, this.y(this.p.peak_bytes)); c.lineTo(x, this.y(0)); c.stroke();
    if (width > 1) { c.beginPath(); c.arc(x, this.y(0) + 4, 4, 0, 7); c.fill(); }
  }

  drawHighlight(c) {
    const i = this.buffer ?? (state.active === this.index ? state.pinned : null);
    const layer = this.hoveredLayer ?? (state.active === this.index && state.layer ? state.layer.index : null);
    if (i === null && layer === null) return;
    c.fillStyle = css("--card");
    c.globalAlpha = 0.7;
    const top = this.y(this.p.peak_bytes) + 2; // below the label of the peak
    c.fillRect(PLOT.left, top, this.width, this.y(0) - top);
    c.globalAlpha = 1;
    if (i === null) return this.drawBand(c, layer);
    const k = layers.of[this.index][i];
    const { start, end } = this.p.buffer(i);
    const a = this.x(start), b = Math.max(this.x(end + 1), a + 2);
    c.fillStyle = css("--accent");
    c.globalAlpha = 0.14;
    c.fillRect(a, PLOT.top, b - a, PLOT.height);
    c.globalAlpha = 1;
    c.fillRect(a, this.y(0) + 1, b - a, 4);
    if (k === 255) return; // a constant, which is in no layer
    // At the bottom of its layer, in its true size.
    const low = this.bottoms[k], high = low.map((bytes, x) => bytes + model.aliveBytes(this.p, i, this.columns[x]));
    const used = [...high.keys()].filter(x => high[x] > low[x]);
    if (!used.length) return;
    const path = this.band(low, high, used[0], used[used.length - 1] + 1);
    c.fillStyle = colorOf(k);
    c.fill(path);
    c.strokeStyle = css("--ink");
    c.lineWidth = 1;
    c.stroke(path);
  }

  drawBand(c, k) {
    if (!this.bands[k]) return;
    c.fillStyle = colorOf(k);
    c.fill(this.bands[k]);
    if (layers.colors[k].hatched) { c.fillStyle = this.hatching(c); c.fill(this.bands[k]); }
  }

  // -- pointer, wheel and keys

  listen() {
    const on = (name, f, options) => this.plot.addEventListener(name, f, options);
    on("pointerdown", e => this.down(e));
    on("pointermove", e => this.move(e));
    on("pointerup", e => this.up(e));
    on("pointercancel", e => { this.pointers.delete(e.pointerId); this.brush = null; this.drawOver(); });
    on("pointerleave", () => { this.hover = null; this.tip.hidden = true; this.drawOver(); });
    on("dblclick", () => this.setView(model.fullView(this.n)));
    on("wheel", e => this.wheel(e), { passive: false });
    on("keydown", e => this.key(e));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  at(e) {
    const box = this.plot.getBoundingClientRect();
    return { x: e.clientX - box.left, y: e.clientY - box.top };
  }

  down(e) {
    if (e.button) return;
    const x = this.at(e).x;
    try { this.plot.setPointerCapture(e.pointerId); } catch { /* a pointer that a script made */ }
    this.pointers.set(e.pointerId, { x, first: x, isTouch: e.pointerType === "touch", isMoved: this.pointers.size > 0 });
  }

  move(e) {
    const { x, y } = this.at(e), pointer = this.pointers.get(e.pointerId);
    if (!pointer) {
      if (e.pointerType !== "touch") this.showTip(x, y);
      return;
    }
    const before = pointer.x;
    if (Math.abs(x - pointer.first) > 5) pointer.isMoved = true;
    if (this.pointers.size === 2) this.pinch(e.pointerId, x);
    else if (pointer.isTouch && pointer.isMoved) this.drag(before, x);
    else if (pointer.isMoved) { this.brush = [pointer.first, x].map(at => Math.min(Math.max(at, PLOT.left), PLOT.left + this.width)); this.drawOver(); }
    pointer.x = x;
  }

  // One finger moves the zoomed picture; if all of it is visible, the finger selects.
  drag(before, x) {
    if (model.isFull(this.view, this.n)) this.select(this.wholeStepAt(x));
    else this.setView(model.pan(this.view, this.stepAt(before) - this.stepAt(x), this.n));
  }

  pinch(id, x) {
    const [[, other]] = [...this.pointers].filter(([key]) => key !== id);
    const before = this.pointers.get(id).x, center = this.stepAt((before + other.x) / 2);
    const factor = Math.max(Math.abs(before - other.x), 10) / Math.max(Math.abs(x - other.x), 10);
    other.isMoved = this.pointers.get(id).isMoved = true;
    this.setView(model.zoom(this.view, center, factor, this.n));
  }

  up(e) {
    const pointer = this.pointers.get(e.pointerId);
    this.pointers.delete(e.pointerId);
    if (!pointer) return;
    const brush = this.brush;
    this.brush = null;
    if (brush && Math.abs(brush[1] - brush[0]) > 5) {
      const [from, to] = brush.map(x => this.stepAt(x)).sort((a, b) => a - b);
      this.setView(model.clamp({ from, to }, this.n));
    } else if (!pointer.isMoved) this.select(this.wholeStepAt(pointer.x));
  }

  wheel(e) {
    const isOut = e.deltaY > 0 && model.isFull(this.view, this.n);
    if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
      e.preventDefault();
      this.setView(model.pan(this.view, e.deltaX / this.width * (this.view.to - this.view.from), this.n));
    } else if (!isOut) { // there is nothing to zoom out to: the page scrolls
      e.preventDefault();
      this.setView(model.zoom(this.view, this.stepAt(this.at(e).x), Math.exp(e.deltaY * (e.ctrlKey ? 0.01 : 0.0015)), this.n));
    }
  }

  key(e) {
    const far = Math.max(Math.round((this.view.to - this.view.from) / 10), 1), step = e.shiftKey ? far : 1;
    const actions = {
      ArrowLeft: () => this.select(this.selected - step, true), ArrowRight: () => this.select(this.selected + step, true),
      PageUp: () => this.select(this.selected - far, true), PageDown: () => this.select(this.selected + far, true),
      Home: () => this.select(0, true), End: () => this.select(this.n - 1, true),
      "+": () => this.setView(model.zoom(this.view, this.center(), 0.5, this.n)),
      "-": () => this.setView(model.zoom(this.view, this.center(), 2, this.n)),
      0: () => this.setView(model.fullView(this.n)), Escape: () => this.setView(model.fullView(this.n)),
      p: () => this.select(this.p.peak_step, true),
    };
    const action = actions[e.key === "=" ? "+" : e.key];
    if (!action || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    action();
  }

  showTip(x, y) {
    if (!this.n || x < PLOT.left || x > PLOT.left + this.width) { this.tip.hidden = true; this.hover = null; return this.drawOver(); }
    const column = Math.min(Math.floor(x - PLOT.left), this.columns.length - 1), step = this.columns[column];
    const info = this.p.step(step), { rows, total } = this.stack;
    this.hover = { x };
    const k = order.find(k => rows[k][step] > 0 && this.y(this.bottoms[k][column]) >= y && y >= this.y(this.bottoms[k][column] + rows[k][step]));
    const lines = [h("b", {}, `Step ${formatCount(step + 1)}: ${formatBytes(total[step])}`)];
    if (k !== undefined) lines.push(h("span", {}, swatch(k), h("b", {}, formatBytes(rows[k][step])), ` ${layers.names[k]}`));
    lines.push(h("span", { class: "dim" }, [info.phase, info.primitive || info.name, info.source].filter(Boolean).join(" · ")));
    if (info.loops.length) lines.push(h("span", { class: "dim" }, `in ${info.loops[info.loops.length - 1]}`));
    this.tip.replaceChildren(...lines.map(line => h("div", {}, line)));
    this.tip.hidden = false;
    const left = x + 14 + this.tip.offsetWidth > this.plot.clientWidth ? x - 14 - this.tip.offsetWidth : x + 14;
    this.tip.style.transform = `translate(${Math.max(left, 0)}px, ${Math.min(Math.max(y - 20, 0), PLOT.height)}px)`;
    this.drawOver();
  }
}
