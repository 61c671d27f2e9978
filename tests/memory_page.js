// Runs what a page of a memory profile computes: node memory_page.js MODEL PAGE, with a JSON list of requests on standard input.
// A request is a list: the name of one of the functions below, and its arguments. Prints the list of the answers.
const fs = require("fs");
const model = require(require("path").resolve(process.argv[2]));

const page = fs.readFileSync(process.argv[3], "utf8");
const data = JSON.parse(/<script type="application\/json" id="data">(.*?)<\/script>/s.exec(page)[1]);
const profiles = data.profiles.map(model.decode);
const all = p => Array.from({ length: p.num_buffers }, (_, i) => i);
const named = (p, found) => found.map(i => p.buffer(i).name);

const functions = {
  buffers: n => all(profiles[n]).map(i => ({ ...profiles[n].buffer(i), taken: profiles[n].b.taken[i] })),
  steps: n => Array.from({ length: profiles[n].num_steps }, (_, i) => profiles[n].step(i)),
  stacks: mode => {
    const layers = model.layersBy(profiles, mode);
    const stacks = profiles.map((p, n) => model.stack(p, layers, n));
    return { names: layers.names, other: layers.other, order: model.stackOrder(stacks, layers),
      rows: stacks.map(stack => stack.rows.map(row => [...row.slice(0, -1)])), totals: stacks.map(stack => [...stack.total]) };
  },
  bestMode: () => model.bestMode(profiles),
  alive: (n, step) => model.alive(profiles[n], step).map(i => [profiles[n].buffer(i).name, model.aliveBytes(profiles[n], i, step)]),
  filter: (n, query) => named(profiles[n], model.filter(profiles[n], { ...query, kinds: query.kinds && new Set(query.kinds) })),
  sort: (n, key, descending) => named(profiles[n], model.sort(profiles[n], all(profiles[n]), key, descending)),
  columns: (total, view, width) => [...model.columns(total, view, width)],
  layerOf: (mode, n) => [...model.layersBy(profiles, mode).of[n]],
};
const pure = ["zoom", "pan", "clamp", "phaseSpans", "ticks", "formatBytes", "family"];
const answers = JSON.parse(fs.readFileSync(0, "utf8")).map(([name, ...args]) =>
  pure.includes(name) ? model[name](...args) : functions[name](...args));
console.log(JSON.stringify(answers));
