// The page: its state, colors and helpers; the timelines are in page_timeline.js, the list in page_list.js.
// All text from the program goes into text nodes, never into HTML.
"use strict";
const { formatBytes, formatCount, formatShare, PHASES } = model;
const data = JSON.parse(document.getElementById("data").textContent);
const profiles = data.profiles.map(model.decode);
const isDouble = profiles.length > 1;
const PLOT = { left: 66, right: 10, top: 26, height: isDouble ? 220 : 300, axis: 20, phase: 18, lane: 17 };
const MAX_LANES = 3, ROWS = 100;
const root = document.documentElement;

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== ""));
  return element;
}

const button = (text, label, onclick) => h("button", { type: "button", "aria-label": label, title: label, onclick }, text);

// -- theme -----------------------------------------------------------------------------------------------------------------------

const css = name => getComputedStyle(root).getPropertyValue(name).trim();
const THEMES = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme");

function setTheme(theme) {
  if (theme === "auto") root.removeAttribute("data-theme");
  else root.setAttribute("data-theme", theme);
  themeButton.textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[theme];
  themeButton.setAttribute("aria-label", `Colors: ${theme}; change`);
  themeButton.dataset.theme = theme;
  try { localStorage.setItem("statetx-theme", theme); } catch { /* a browser may not store anything for a file */ }
  drawAll();
}

function storedTheme() {
  try { return localStorage.getItem("statetx-theme") || "auto"; } catch { return "auto"; }
}

// -- state -----------------------------------------------------------------------------------------------------------------------

const state = {
  mode: model.bestMode(profiles),
  active: profiles.length - 1, // the profile that the list shows
  atStep: true, // whether the list shows what is alive at the selected step, or all buffers
  text: "", kinds: new Set(profiles[0].kinds), layer: null,
  key: "bytes", descending: true, shown: ROWS,
  pinned: null, // the buffer whose row is open
};
const highest = Math.max(...profiles.map(p => p.peak_bytes), 1);
let layers, order, timelines = [];

function setMode(mode) {
  state.mode = mode;
  state.layer = null;
  layers = model.layersBy(profiles, mode);
  const stacks = profiles.map((p, n) => model.stack(p, layers, n));
  order = model.stackOrder(stacks, layers);
  const byKind = { states: "state", arguments: "argument", outputs: "output" };
  let next = 0;
  layers.colors = layers.names.map((name, k) => {
    if (k === layers.other) return { color: "other", hatched: false };
    const fixed = data.kind_colors[mode === "kind" ? name : byKind[name]];
    if (fixed) return { color: fixed, hatched: false };
    const color = { color: data.palette[next % data.palette.length], hatched: next >= data.palette.length };
    next += 1;
    return color;
  });
  timelines.forEach((t, n) => t.setStack(stacks[n]));
}

const colorOf = k => layers.colors[k].color === "other" ? css("--other") : layers.colors[k].color;

function swatch(k) {
  const i = h("i", { class: layers.colors[k].hatched ? "swatch hatched" : "swatch" });
  i.style.backgroundColor = colorOf(k);
  return i;
}

const drawAll = () => timelines.forEach(t => t.draw());
