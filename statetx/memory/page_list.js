// The list of buffers: it filters, sorts, and shows a buffer's lifetime in the timeline; then the page starts.
const COLUMNS = [["bytes", "Bytes"], ["kind", "Kind"], ["owner", "Owner"], ["type", "Type"], ["source", "Line"], ["start", "Lifetime"]];

class BufferList {
  constructor() {
    this.choices = h("div", { class: "choices", role: "group", "aria-label": "Which buffers" });
    this.search = h("input", { type: "search", placeholder: "Filter: owner, line, type, operation …", "aria-label": "Filter buffers", oninput: () => this.set({ text: this.search.value }) });
    this.sorting = h("select", { "aria-label": "Sort by", onchange: () => { const [key, way] = this.sorting.value.split(" "); this.set({ key, descending: way === "down" }); } },
      ...[["bytes down", "Largest first"], ["bytes up", "Smallest first"], ["start up", "Earliest first"], ["start down", "Latest first"], ["owner up", "By owner"],
        ["owner down", "By owner, reversed"], ["source up", "By line"], ["source down", "By line, reversed"], ["kind up", "By kind"], ["kind down", "By kind, reversed"],
        ["type up", "By type"], ["type down", "By type, reversed"]].map(([value, text]) => h("option", { value }, text)));
    this.kinds = h("div", { class: "chips", role: "group", "aria-label": "Kinds" });
    this.summary = h("p", { class: "status", "aria-live": "polite" });
    this.head = h("tr", { role: "row" }, ...COLUMNS.map(([key, text]) => h("th", { scope: "col", class: key, role: "columnheader" },
      h("button", { type: "button", onclick: () => this.sortBy(key) }, text))));
    this.body = h("tbody", { role: "rowgroup" });
    this.more = h("button", { type: "button", class: "more", onclick: () => this.set({ shown: state.shown + 5 * ROWS }, true) });
    const table = h("table", { class: "list", role: "table", "aria-label": "Buffers" }, h("thead", { role: "rowgroup" }, this.head), this.body);
    this.element = document.getElementById("buffers");
    this.element.append(h("h2", {}, "Buffers"), h("div", { class: "tools" }, this.choices, this.search, this.sorting), this.kinds, this.summary, table, this.more);
    for (const p of profiles) if (p.small) this.element.append(h("p", { class: "note" }, this.smallNote(p)));
  }

  smallNote(p) {
    const where = p.label ? `, ${p.label}` : "";
    return `${formatCount(p.small.count)} small buffers of at most ${formatBytes(p.small.max_bytes)} each are not listed${where}, so that the page stays small. The timeline counts them in “other”.`;
  }

  set(changes, isSameList = false) {
    Object.assign(state, changes);
    this.changed(isSameList);
  }

  sortBy(key) {
    const isNumber = key === "bytes";
    this.set({ key, descending: state.key === key ? !state.descending : isNumber });
  }

  changed(isSameList = false) {
    const p = profiles[state.active], step = state.atStep ? timelines[state.active].selected : null;
    if (!isSameList) { state.shown = ROWS; state.pinned = null; }
    const layer = state.layer && { index: state.layer.index, of: layers.of[state.active] };
    const ofText = model.filter(p, { text: state.text, step, layer });
    const found = ofText.filter(i => state.kinds.has(p.kinds[p.b.kind[i]]));
    this.sorted = model.sort(p, found, state.key, state.descending);
    this.showChoices(p);
    this.showKinds(p, ofText, step);
    const bytes = found.reduce((sum, i) => sum + this.bytesOf(p, i, step), 0);
    const shown = Math.min(state.shown, found.length);
    this.summary.textContent = `${formatCount(found.length)} ${found.length === 1 ? "buffer" : "buffers"}, ${formatBytes(bytes)}${shown < found.length ? `; the first ${formatCount(shown)} are shown` : ""}`;
    this.more.hidden = shown === found.length;
    this.more.textContent = `Show ${formatCount(Math.min(5 * ROWS, found.length - shown))} more`;
    this.sorting.value = `${state.key} ${state.descending ? "down" : "up"}`;
    [...this.head.children].forEach((th, n) => th.setAttribute("aria-sort", COLUMNS[n][0] !== state.key ? "none" : state.descending ? "descending" : "ascending"));
    this.body.replaceChildren(...this.sorted.slice(0, shown).flatMap(i => this.rows(p, i, step)));
    timelines.forEach(t => { t.buffer = null; t.drawOver(); });
  }

  // A buffer of which others take a part in this step has less.
  bytesOf(p, i, step) { return step === null ? p.b.bytes[i] : model.aliveBytes(p, i, step); }

  showChoices(p) {
    const step = timelines[state.active].selected, isPeak = step === p.peak_step;
    const choice = (text, isOn, changes) => h("button", {
      type: "button", "aria-pressed": String(isOn),
      onclick: () => { this.set(changes); timelines.forEach(t => t.showLegend()); },
    }, text);
    const items = isDouble ? profiles.map((other, n) => choice(other.label, n === state.active, { active: n })) : [];
    const layer = state.layer && choice(`${layers.names[state.layer.index]} ✕`, true, { layer: null });
    this.choices.replaceChildren(
      ...(isDouble ? [h("span", { class: "switch" }, ...items)] : []),
      h("span", { class: "switch" }, choice(isPeak ? "At the peak" : `At step ${formatCount(step + 1)}`, state.atStep, { atStep: true }), choice("All", !state.atStep, { atStep: false })),
      ...(layer ? [layer] : []));
  }

  showKinds(p, found, step) {
    const focused = this.kinds.contains(document.activeElement) ? document.activeElement.dataset.kind : null;
    const bytes = new Map();
    for (const i of found) bytes.set(p.kinds[p.b.kind[i]], (bytes.get(p.kinds[p.b.kind[i]]) || 0) + this.bytesOf(p, i, step));
    const toggle = kind => () => {
      // The first tap shows one kind alone; later ones add and remove kinds; none is the same as all.
      const kinds = state.kinds.size === p.kinds.length ? new Set() : new Set(state.kinds);
      if (!kinds.delete(kind)) kinds.add(kind);
      this.set({ kinds: kinds.size ? kinds : new Set(p.kinds) });
    };
    const isAll = state.kinds.size === p.kinds.length;
    this.kinds.replaceChildren(...p.kinds.filter(kind => bytes.has(kind) || (!isAll && state.kinds.has(kind))).map(kind => {
      const mark = h("i", { class: "swatch" });
      mark.style.backgroundColor = data.kind_colors[kind];
      return h("button", { type: "button", class: "chip", "data-kind": kind, "aria-pressed": String(!isAll && state.kinds.has(kind)), onclick: toggle(kind) },
        mark, kind, h("span", { class: "dim" }, formatBytes(bytes.get(kind) || 0)));
    }));
    if (focused) [...this.kinds.children].find(chip => chip.dataset.kind === focused)?.focus();
  }

  rows(p, i, step) {
    const b = p.buffer(i), bytes = this.bytesOf(p, i, step), isOpen = state.pinned === i;
    const life = h("span", { class: "life", title: `steps ${formatCount(b.start + 1)} to ${formatCount(b.end + 1)}` }, h("i"));
    life.firstChild.style.cssText = `left:${100 * b.start / p.num_steps}%;width:${Math.max(100 * (b.end - b.start + 1) / p.num_steps, 1.5)}%;background:${data.kind_colors[b.kind]}`;
    const mark = h("i", { class: "swatch" });
    mark.style.backgroundColor = data.kind_colors[b.kind];
    const made = [b.function !== b.owner ? b.function : "", b.primitive].filter(Boolean).join(" · ");
    const cell = (name, ...children) => h("td", { class: name, role: "cell" }, ...children);
    const size = h("b", { title: `${formatCount(bytes)} bytes` }, formatBytes(bytes));
    const row = h("tr", {
      role: "row", tabindex: 0, class: isOpen ? "open" : "", "data-buffer": i, "aria-expanded": String(isOpen),
      onclick: () => this.pin(i), onkeydown: e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); this.pin(i); } },
      onpointerenter: () => this.highlight(i), onpointerleave: () => this.highlight(null),
      onfocus: () => this.highlight(i), onblur: () => this.highlight(null),
    },
    cell("bytes", size), cell("kind", mark, b.kind), cell("owner", h("code", {}, b.owner || "unknown"), made ? h("div", { class: "dim" }, made) : ""),
    cell("type", h("code", {}, b.type)), cell("source", h("code", {}, b.source)), cell("start", life));
    return isOpen ? [row, this.details(p, b)] : [row];
  }

  details(p, b) {
    const facts = [
      ["instruction", b.name], ["written in step", `${formatCount(b.start + 1)} (${b.phase})`],
      ["read until step", `${formatCount(b.end + 1)}${p.step(b.end).primitive ? `: ${p.step(b.end).primitive}` : ""}${p.step(b.end).source ? ` at ${p.step(b.end).source}` : ""}`],
      ["bytes", formatCount(b.bytes)], ["function", b.function], ["operation", b.primitive], ["rematerialized in", b.region],
      ["in loop", b.loop], ["stacked by", b.stacked],
    ].filter(([, value]) => value);
    const show = button("Zoom to its lifetime", "Zoom the timeline to the lifetime of this buffer", e => {
      e.stopPropagation();
      const margin = 0.15 * (b.end - b.start + 1) + 1, t = timelines[state.active];
      t.setView(model.clamp({ from: b.start - margin, to: b.end + 1 + margin }, t.n));
      t.element.scrollIntoView({ block: "nearest" });
    });
    return h("tr", { class: "detail", role: "row" }, h("td", { colspan: COLUMNS.length, role: "cell" },
      h("dl", {}, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))), show));
  }

  highlight(i) {
    const t = timelines[state.active];
    t.buffer = i;
    t.drawOver();
  }

  pin(i) {
    state.pinned = state.pinned === i ? null : i;
    const p = profiles[state.active], step = state.atStep ? timelines[state.active].selected : null;
    this.body.querySelectorAll(".detail").forEach(row => row.remove());
    for (const row of [...this.body.children]) {
      const isOpen = Number(row.dataset.buffer) === state.pinned;
      row.classList.toggle("open", isOpen);
      row.setAttribute("aria-expanded", String(isOpen));
      if (isOpen) row.after(this.details(p, p.buffer(state.pinned)));
    }
    timelines[state.active].drawOver();
  }
}

// -- start -------------------------------------------------------------------------------------------------------------------------

const MODES = [["owner", "owner"], ["merged", "owner, layers merged"], ["kind", "kind"], ["line", "line"]];
const stacking = h("select", { id: "stacking", onchange: () => { setMode(stacking.value); list.changed(); } }, ...MODES.map(([value, text]) => h("option", { value }, text)));
stacking.value = state.mode;
const stackBy = h("label", {}, "Stack by ", stacking);
const hints = h("p", { class: "note", id: "keys" },
  h("span", { class: "mouse" }, "Click selects a step, drag or wheel zooms, double click shows all. Keys: ← → + − 0, P for the peak."),
  h("span", { class: "touch" }, "Tap selects a step, pinch zooms, a finger moves, double tap shows all."));
timelines = profiles.map((_, n) => new Timeline(n));
const section = document.getElementById("timelines");
if (isDouble) section.append(h("div", { class: "bar-top" }, h("h2", {}, "Timelines"), stackBy));
else timelines[0].buttons.before(stackBy);
section.append(...timelines.map(t => t.element), hints);
const list = new BufferList();
setMode(state.mode);
list.changed();
themeButton.hidden = false;
themeButton.addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(themeButton.dataset.theme) + 1) % THEMES.length]));
setTheme(storedTheme());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
