// Asks a built site's search: node search.js SITE, with a JSON list of queries on standard input.
// It runs the worker that the page's search box runs, on the index that the page loads, and prints for each query the pages in the order shown.
const fs = require("fs"), path = require("path"), vm = require("vm");

const site = process.argv[2];
const workers = path.join(site, "assets", "javascripts", "workers");
const source = fs.readFileSync(path.join(workers, fs.readdirSync(workers).find(name => /^search\.\w+\.min\.js$/.test(name))), "utf8");
const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"));

// What a browser gives a worker.
let ask;
const answers = [];
globalThis.self = globalThis;
globalThis.addEventListener = (kind, listener) => { ask = data => listener({ data }); };
globalThis.postMessage = message => answers.push(message);
vm.runInThisContext(source);

const [SETUP, QUERY] = [0, 2];  // SearchMessageType
(async () => {
  await ask({ type: SETUP, data: { config: index.config, docs: index.docs, options: { suggest: false } } });
  for (const query of JSON.parse(fs.readFileSync(0, "utf8"))) await ask({ type: QUERY, data: query });
  const found = answers.slice(1).map(answer => answer.data.items.map(page => ({
    page: page[0].location.split("#")[0], best: page[0].location })));
  console.log(JSON.stringify(found));
})();
