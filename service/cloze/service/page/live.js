// Plots of the server's own metrics, from differences between two scrapes of /metrics.

import { element } from "./elements.js";

const PERIOD_MS = 2000;
const POINTS = 60;
const SVG = "http://www.w3.org/2000/svg";

const PLOTS = [
  { title: "Requests per second", curves: { rate: "requests" } },
  { title: "Latency in ms", curves: { p50: "p50", p99: "p99" } },
  { title: "Texts per batch", curves: { batch: "texts" } },
  { title: "Tokens in the queue", curves: { queue: "tokens" } },
];

/** Shows the plots in a parent element, from scrapes with headers; returns what ends them. */
export function showLive(parent, headers) {
  const history = [];
  const status = element("p", { class: "faint" }, "Waiting for two scrapes of /metrics ...");
  const figures = PLOTS.map(figure);
  parent.append(
    element("p", { class: "faint" }, "This server's metrics, every 2 seconds, for two minutes."),
    element("div", { class: "plots" }, ...figures.map(({ shown }) => shown)),
    status);
  let before = null;
  let timer = null;
  let ended = false;

  async function scrape() {
    if (document.hidden) {
      before = null;
      timer = setTimeout(scrape, PERIOD_MS);
      return;
    }
    try {
      const response = await fetch("metrics", { headers });
      if (!response.ok) throw new Error(`${response.status}: ${(await response.json()).error}`);
      const now = summary(await response.text(), performance.now() / 1000);
      if (ended) return;
      if (before && now.requests >= before.requests) { // else the server has started again
        history.push(difference(before, now));
        history.splice(0, history.length - POINTS);
        for (const { draw } of figures) draw(history);
        status.textContent = "";
      }
      before = now;
    } catch (error) { // a TypeError has no response
      status.textContent = error instanceof TypeError ? "The server does not answer." : error.message;
    }
    if (!ended) timer = setTimeout(scrape, PERIOD_MS);
  }
  scrape();
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}

/** Returns the sums over all models and routes of the metrics that the plots need. */
function summary(text, time) {
  const sums = { time, requests: 0, buckets: new Map(), texts: 0, batches: 0, queue: 0 };
  for (const line of text.split("\n")) {
    const sample = /^(\w+?)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!sample) continue;
    const [, name, labels = "", value] = sample;
    const number = Number(value);
    if (name === "cloze_batch_sequences_sum") sums.texts += number;
    else if (name === "cloze_batch_sequences_count") sums.batches += number;
    else if (name === "cloze_queue_tokens") sums.queue += number;
    else if (!/model="[^"]/.test(labels)) continue; // a request to no model, such as this scrape
    else if (name === "cloze_requests_total") sums.requests += number;
    else if (name === "cloze_request_duration_seconds_bucket") {
      const limit = Number(/le="([^"]+)"/.exec(labels)[1].replace("+Inf", "Infinity"));
      sums.buckets.set(limit, (sums.buckets.get(limit) ?? 0) + number);
    }
  }
  return sums;
}

function difference(before, now) {
  const counts = [...now.buckets]
    .sort(([one], [other]) => one - other)
    .map(([limit, count]) => [limit, count - (before.buckets.get(limit) ?? 0)]);
  const batches = now.batches - before.batches;
  return {
    rate: (now.requests - before.requests) / (now.time - before.time),
    p50: quantile(counts, 0.5),
    p99: quantile(counts, 0.99),
    batch: batches ? (now.texts - before.texts) / batches : null,
    queue: now.queue,
  };
}

/** Returns a quantile in ms of cumulative [seconds, count] buckets, linear within a bucket.
 *
 * Without a request, there is none: null.
 */
function quantile(buckets, share) {
  const total = buckets.length ? buckets.at(-1)[1] : 0;
  if (!total) return null;
  let low = 0;
  let below = 0;
  for (const [limit, count] of buckets) {
    if (count >= total * share) {
      if (limit === Infinity) return low * 1000;
      const part = count > below ? (total * share - below) / (count - below) : 1;
      return (low + (limit - low) * part) * 1000;
    }
    [low, below] = [limit, count];
  }
  return 0;
}

/** Returns a plot with axes and a legend, and a function that draws a history in it.
 *
 * `curves` maps the names of values to their words in the legend.
 */
function figure({ title, curves }) {
  const names = Object.keys(curves);
  const kind = (index) => (index ? "second" : "first");
  const drawing = svg("svg", { viewBox: `0 0 ${POINTS} 100`, preserveAspectRatio: "none", role: "img" });
  drawing.append(svg("line", { x1: 0, x2: POINTS, y1: 50, y2: 50 }));
  const lines = names.map((_, index) => svg("path", { class: kind(index) }));
  drawing.append(...lines);
  const legend = names.map((name, index) => element("span", { class: kind(index) }, curves[name]));
  const ticks = ["", "", "0"].map((text) => element("span", {}, text));
  const minutes = (POINTS * PERIOD_MS) / 60_000;
  const shown = element("figure", {},
    element("figcaption", {}, title),
    element("div", { class: "legend" }, ...legend),
    element("div", { class: "axis values", "aria-hidden": "true" }, ...ticks),
    drawing,
    element("div", { class: "axis time" },
      element("span", {}, `${minutes} minutes ago`), element("span", {}, "now")));

  function draw(history) {
    const most = rounded(Math.max(...history.flatMap((point) => names.map((name) => point[name] ?? 0))));
    lines.forEach((line, index) => {
      const values = history.map((point) => point[names[index]]);
      line.setAttribute("d", values.map((value, i) => { // a gap where there is no value
        const place = `${i + POINTS - history.length},${100 - 98 * (value / most)}`;
        return value === null ? "" : `${(values[i - 1] ?? null) === null ? `M${place}` : ""}L${place}`;
      }).join(""));
    });
    [ticks[0].textContent, ticks[1].textContent] = [String(most), String(most / 2)];
    names.forEach((name, index) => {
      legend[index].textContent = `${curves[name]} ${history.at(-1)[name]?.toFixed(1) ?? "–"}`;
    });
    const latest = legend.map(({ textContent }) => textContent).join(", ");
    drawing.setAttribute("aria-label", `${title}: ${latest}`);
  }
  drawing.setAttribute("aria-label", title);
  return { shown, draw };
}

/** Returns the end of an axis: 1, 2 or 5 times a power of ten, at least the number. */
function rounded(number) {
  if (!(number > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(number));
  const factor = [1, 2, 5, 10].find((one) => one * power >= number * 0.9999);
  return Number((factor * power).toPrecision(3));
}

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
