// Asks the search of the documentation site, without a browser, and prints the first results of each
// question as JSON: node search.mjs FOLDER QUESTION...
import { readdirSync, readFileSync } from "node:fs";

const [folder, ...questions] = process.argv.slice(2);
const workers = `${folder}/assets/javascripts/workers/`;
const index = JSON.parse(readFileSync(`${folder}/search.json`, "utf8"));
let receive;
globalThis.self = { postMessage: (message) => receive(message) };

// The messages of the site's own page: 0 gives the index, 2 asks.
function post(type, data) {
  return new Promise((resolve) => {
    receive = resolve;
    self.onmessage({ data: { type, data } });
  });
}

const [worker] = readdirSync(workers).filter((name) => name.startsWith("search"));
(0, eval)(readFileSync(workers + worker, "utf8"));
await post(0, index);
const noTags = { type: "operator", data: { operator: "and", operands: [] } };
const found = {};
for (const input of questions) {
  const { data } = await post(2, { input, filter: { input: noTags, aggregation: { input: [] } } });
  found[input] = data.items.slice(0, 3).map((item) => index.items[item.id].location);
}
console.log(JSON.stringify(found));
