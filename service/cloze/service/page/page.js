// The page: chooses a panel by the address, sends its request, and shows answer, times and code.

import { element, measured } from "./elements.js";
import { showLive } from "./live.js";
import { PANELS } from "./panels.js";

const BASE = new URL(".", document.baseURI).href.slice(0, -1); // also below a path of a proxy
const LIVE = { task: "live", title: "Live" };
const main = document.getElementById("main");
const nav = document.getElementById("panels");

let leave = () => {}; // ends what the shown panel has under way
let headers = {}; // with the key, if the server has keys; a reload forgets the key

const alarm = (message) => element("p", { class: "error", role: "alert" }, message);

async function start() {
  let response, info;
  try {
    response = await fetch(`${BASE}/info`, { headers });
    info = await response.json();
  } catch {
    main.replaceChildren(alarm("The server does not answer."));
    return;
  }
  if (response.status === 401 && !headers.authorization) {
    main.replaceChildren(keyForm());
    return;
  }
  if (!response.ok) {
    main.replaceChildren(alarm(`${response.status}: ${info.error}`), keyForm());
    return;
  }
  for (const { task, title } of [...PANELS, LIVE]) {
    nav.append(element("a", { href: `#${task}` }, title));
  }
  addEventListener("hashchange", () => {
    route(info);
    main.querySelector("h2").focus(); // the next Tab is in the panel, not in the tabs
  });
  route(info);
}

function keyForm() {
  const key = element("input", { type: "password", required: true, autocomplete: "off" });
  const form = element("form", {},
    element("label", {}, "Key of this server", key),
    element("div", {}, element("button", { type: "submit" }, "Use the key")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    headers = { authorization: `Bearer ${key.value}` };
    start();
  });
  return form;
}

function route(info) {
  leave();
  leave = () => {};
  const task = location.hash.slice(1);
  const panel = [...PANELS, LIVE].find((one) => one.task === task) ?? PANELS[0];
  for (const link of nav.children) {
    if (link.hash === `#${panel.task}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${panel.title} - Cloze`;
  main.replaceChildren(element("h2", { tabIndex: -1 }, panel.title));
  if (panel === LIVE) leave = showLive(main, headers);
  else if (panel.task in info.defaults) leave = showPanel(panel, info);
  else main.append(...notServed(panel));
}

function notServed({ task, exported = task }) {
  return [
    element("p", {}, `No served model does ${task}. Export one from a checkpoint that has the head:`),
    element("pre", {}, `cloze export CHECKPOINT --name NAME --task ${exported}\ncloze serve`),
  ];
}

function showPanel(panel, info) {
  const models = info.models
    .filter(({ tasks }) => tasks.includes(panel.task))
    .map(({ name, version }) => `${name}@${version}`);
  const inputs = Object.fromEntries(panel.fields.map((field) => [field.name, input(field)]));
  const model = element("select", { name: "model" }, ...options(models));
  model.value = info.defaults[panel.task];
  const small = panel.fields.filter(({ kind, choices }) => kind || choices);
  const served = () =>
    info.models.find(({ name, version }) => `${name}@${version}` === model.value);
  const labels = Object.fromEntries(panel.fields.map(({ label, name }) =>
    [name, element("label", {}, element("span", {}, label), inputs[name])]));
  const labelled = ({ name }) => labels[name];
  let mask = "[MASK]";
  const choose = () => {
    const { tasks, mask_token: own = mask, ...told } = served();
    for (const { name, choices, only } of panel.fields) {
      if (choices) inputs[name].replaceChildren(...options(told[choices] ?? []));
      else inputs[name].value = inputs[name].value.replaceAll(mask, own);
      labels[name].firstChild.textContent = labels[name].firstChild.textContent.replace(mask, own);
      labels[name].hidden = choices ? !told[choices] : only && !tasks.includes(only);
    }
    mask = own;
  };
  model.addEventListener("change", choose);
  choose();
  const form = element("form", {},
    ...panel.fields.filter((field) => !small.includes(field)).map(labelled),
    element("div", { class: "row" },
      ...small.map(labelled),
      element("label", {}, "Model", model),
      element("button", { type: "submit" }, "Ask")));
  const status = element("p", { class: "faint", role: "status" });
  const output = element("div");
  let underway = new AbortController();

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    underway.abort();
    const current = underway = new AbortController();
    const values = { tasks: served().tasks };
    for (const [name, { value }] of Object.entries(inputs)) values[name] = value;
    const body = panel.body(values);
    if (model.value !== info.defaults[panel.task]) body.model = model.value;
    try {
      const shown = await ask(panel, values, body, current.signal);
      if (current !== underway) return;
      output.replaceChildren(...shown, ...code(panel, values, body));
      status.textContent = output.querySelector(".error") ? "" : "Answered.";
    } catch (error) {
      if (error.name === "AbortError") return;
      output.replaceChildren(alarm(`No answer to show: ${error.message}`));
    }
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  main.append(form, status, output);
  form.requestSubmit();
  return () => underway.abort();
}

function options(names) {
  return names.map((name) => element("option", { value: name }, name));
}

function input({ value, rows, kind, choices }) {
  if (choices) return element("select", {});
  if (kind) return element("input", { type: kind, value, min: 1 });
  return rows ? element("textarea", { value, rows }) : element("input", { type: "text", value });
}

/** Sends a request; returns the elements that show its answer, or what went wrong. */
async function ask(panel, values, body, signal) {
  const started = performance.now();
  let response, answer;
  try {
    response = await fetch(BASE + panel.route, {
      method: "POST",
      headers: { "content-type": "application/json", ...headers },
      body: JSON.stringify(body),
      signal,
    });
    answer = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return [alarm("The server does not answer.")];
  }
  if (!response.ok) {
    const wait = response.headers.get("retry-after");
    return [alarm(`${response.status}: ${answer.error}${wait ? `; try again in ${wait} s` : ""}`)];
  }
  const cut = Number(response.headers.get("x-truncated"));
  const warnings = [
    ...(cut ? [`${cut === 1 ? "1 text was" : `${cut} texts were`} cut to the model's limit`] : []),
    ...(response.headers.get("x-warning") ?? "").split("; ").filter(Boolean),
  ];
  return [
    element("h3", {}, "Answer"),
    ...panel.show(answer, values),
    ...warnings.map((warning) => element("p", { class: "faint" }, `Warning: ${warning}`)),
    times(performance.now() - started, response.headers),
  ];
}

function times(total, headers) {
  const part = (name) => measured(headers.get(`x-${name}-time`), "ms");
  return element("p", { class: "faint" },
    `${measured(total.toFixed(0), "ms")} in the browser. In the server: tokenizing ${part("tokenization")}, ` +
    `queue ${part("queue")}, inference ${part("inference")}; ` +
    `${measured(headers.get("x-compute-tokens"), "tokens")}.`);
}

/** Returns the commands that repeat a request. */
function code(panel, values, body) {
  const json = JSON.stringify(body).replaceAll("'", "'\\''");
  const call = panel.python(values).slice(0, -1) + (body.model ? `, model="${body.model}")` : ")");
  const key = headers.authorization ? " -H 'authorization: Bearer KEY'" : ""; // KEY is the user's
  const program = [
    "from cloze.client import Client",
    "",
    `with Client("${BASE}"${headers.authorization ? ', headers={"authorization": "Bearer KEY"}' : ""}) as client:`,
    `    print(${call})`,
  ].join("\n");
  return [
    ...copied("curl", `curl ${BASE}${panel.route}${key} -d '${json}'`),
    ...copied("Python", program),
  ];
}

function copied(title, text) {
  const button = element("button", { type: "button" }, `Copy ${title}`);
  const pre = element("pre", {}, text);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch { // without a permission, or without https: the user copies the selection
      getSelection().selectAllChildren(pre);
      button.textContent = "Selected";
    }
  });
  return [element("h3", {}, title), pre, button];
}

start();
