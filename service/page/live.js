// Plots of the server's own metrics, from differences between two scrapes of /metrics.

import { element } from "./elements.js";

const PERIOD_MS = 2000;
const POINTS = 60;
const SVG = "http://www.w3.org/2000/svg";

const PLOTS = [
  { title: "Requests per second", values: ["rate"], unit: "" },
  { title: "Latency p50 and p99", values: ["p50", "p99"], unit: " ms" },
  { title: "Texts per batch", values: ["batch"], unit: "" },
  { title: "Tokens in the queue", values: ["queue"], unit: "" },
];

/** Shows the plots in a parent element; returns what ends them. */
export function showLive(parent) {
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
      const response = await fetch("metrics");
      if (!response.ok) throw new Error(`status ${response.status}`);
      const now = summary(await response.text(), performance.now() / 1000);
      if (ended) return;
      if (before && now.requests >= before.requests) { // else the server has started again
        history.push(difference(before, now));
        history.splice(0, history.length - POINTS);
        for (const { draw } of figures) draw(history);
        status.textContent = "";
      }
      before = now;
    } catch {
      status.textContent = "The server does not answer.";
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
    batch: batches ? (now.texts - before.texts) / batches : 0,
    queue: now.queue,
  };
}

/** Returns a quantile in ms of cumulative [seconds, count] buckets, linear within a bucket. */
function quantile(buckets, share) {
  const total = buckets.length ? buckets.at(-1)[1] : 0;
  let low = 0;
  let below = 0;
  for (const [limit, count] of buckets) {
    if (total && count >= total * share) {
      if (limit === Infinity) return low * 1000;
      const part = count > below ? (total * share - below) / (count - below) : 1;
      return (low + (limit - low) * part) * 1000;
    }
    [low, below] = [limit, count];
  }
  return 0;
}

function figure({ title, values, unit }) {
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", `0 0 ${POINTS} 100`);
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("role", "img");
  const curves = values.map((_, index) => {
    const curve = document.createElementNS(SVG, "polyline");
    if (index) curve.setAttribute("class", "second");
    drawing.append(curve);
    return curve;
  });
  const latest = element("span", {}, "-");
  const shown = element("figure", {}, element("figcaption", {}, title, latest), drawing);

  function draw(history) {
    const most = Math.max(1e-9, ...history.flatMap((point) => values.map((name) => point[name])));
    curves.forEach((curve, index) => {
      const points = history.map((point, i) =>
        `${i + POINTS - history.length},${98 - 94 * (point[values[index]] / most)}`);
      curve.setAttribute("points", points.join(" "));
    });
    latest.textContent = values.map((name) => history.at(-1)[name].toFixed(1) + unit).join(" / ");
    drawing.setAttribute("aria-label", `${title}: ${latest.textContent}`);
  }
  drawing.setAttribute("aria-label", title);
  return { shown, draw };
}
