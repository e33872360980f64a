// One panel per task: its fields, the request that they make, and how its answer is shown.

import { bars, clamp, element, percent, spanned } from "./elements.js";

const SURPRISING = 10; // nats: a token of probability 1 in 22,000 has the strongest colour
const KINDS = 5; // colours of entities

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const python = JSON.stringify; // its strings and lists are Python's too

const PATTERNS = ["EMAIL", "PHONE", "IBAN", "CARD"];

/** Returns the labels to replace; a tagger replaces those that it has. */
const replaced = ({ labels, tasks }) =>
  tasks.includes("token-classification") ? undefined : lines(labels);

/** The panels in the order of the page.
 *
 * `exported` is the task to export for the panel, if it is another one. A field is a text, several
 * lines if it has `rows`, or one of the names that `/info` has of the model under `choices`. Models
 * without the task `only` have no use for a field. Texts have [MASK] for the model's own mask. `body`
 * and `python` take the values of the fields by name, and the `tasks` of the chosen model; `show`
 * takes the answer and the values, and returns elements.
 */
export const PANELS = [
  {
    task: "fill-mask",
    title: "Fill-mask",
    route: "/fill-mask",
    fields: [
      { name: "text", label: "Text with one or more [MASK]", value: "She opened the [MASK] and went in.", rows: 2 },
      { name: "top", label: "Predictions", value: "5", kind: "number" },
    ],
    body: ({ text, top }) => ({ inputs: text, parameters: { top_k: Number(top) } }),
    python: ({ text, top }) => `client.fill_mask(${python(text)}, top_k=${Number(top)})`,
    show(answer) {
      const masks = Array.isArray(answer[0]) ? answer : [answer];
      return masks.flatMap((predictions, mask) => [
        ...(masks.length > 1 ? [element("h3", {}, `Mask ${mask + 1}`)] : []),
        bars(predictions.map(({ token_str, score }) => ({ name: token_str, share: score }))),
      ]);
    },
  },
  {
    task: "embed",
    title: "Embeddings",
    route: "/embed",
    fields: [
      {
        name: "texts",
        label: "Texts to compare, one per line",
        value: "The king was dead.\nThe old king died.\nA ship left the harbour.",
        rows: 5,
      },
    ],
    body: ({ texts }) => ({ inputs: lines(texts), normalize: true }),
    python: ({ texts }) => `client.embed(${python(lines(texts))}, normalize=True)`,
    show(vectors, { texts }) {
      const cosine = (one, other) => one.reduce((sum, number, i) => sum + number * other[i], 0);
      const head = element("tr", {}, element("td"), ...vectors.map((_, i) =>
        element("th", { scope: "col" }, `${i + 1}`)));
      const rows = vectors.map((vector, i) =>
        element("tr", {},
          element("th", { scope: "row" }, `${i + 1}. ${lines(texts)[i]}`),
          ...vectors.map((other) => {
            const value = cosine(vector, other);
            return element("td", { class: "heat", "--share": clamp(value) }, value.toFixed(3));
          })));
      const table = element("table", {},
        element("caption", { class: "faint" }, `cosines of vectors of ${vectors[0].length} numbers`),
        element("thead", {}, head), element("tbody", {}, ...rows));
      return [element("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Cosines" }, table)];
    },
  },
  {
    task: "nsp",
    title: "Next sentence",
    route: "/nsp",
    fields: [
      { name: "text", label: "Text", value: "He opened the door.", rows: 2 },
      { name: "next", label: "Does this text follow?", value: "Then he went into the house.", rows: 2 },
    ],
    body: ({ text, next }) => ({ inputs: { text, next } }),
    python: ({ text, next }) => `client.nsp((${python(text)}, ${python(next)}))`,
    show: (labels) => [bars(labels.map(({ label, score }) => ({ name: label, share: score })))],
  },
  {
    task: "qa",
    title: "Questions",
    route: "/qa",
    fields: [
      { name: "question", label: "Question", value: "Who wrote the letter?" },
      {
        name: "context",
        label: "Text with the answer",
        value: "The letter was written by a merchant named John Smith in 1702. It was found in London two centuries later.",
        rows: 6,
      },
    ],
    body: ({ question, context }) => ({ inputs: { question, context }, parameters: { top_k: 4 } }),
    python: ({ question, context }) => `client.qa((${python(question)}, ${python(context)}), top_k=4)`,
    show(answers, { context }) {
      const spans = [answers].flat();
      const place = element("div");
      const mark = ({ start, end }) => place.replaceChildren(
        spanned(context, [{ start, end, make: (part) => element("mark", {}, part) }]));
      mark(spans[0]);
      const others = spans.flatMap((answer) => {
        const button = element("button", { type: "button" }, answer.answer || "(no answer)");
        button.addEventListener("click", () => mark(answer));
        return [button, element("span", {}, percent(answer.score))];
      });
      return [place, element("h3", {}, "Answers"), element("div", { class: "answers" }, ...others)];
    },
  },
  {
    task: "token-classification",
    title: "Entities",
    route: "/token-classification",
    fields: [{ name: "text", label: "Text", value: "Ada Lovelace was born in London.", rows: 4 }],
    body: ({ text }) => ({ inputs: text }),
    python: ({ text }) => `client.token_classification(${python(text)})`,
    show(entities, { text }) {
      const kinds = [...new Set(entities.map(({ entity_group }) => entity_group))];
      if (!entities.length) return [element("p", {}, "No entity found.")];
      return [spanned(text, entities.map(({ entity_group, score, start, end }) => ({
        start,
        end,
        make: (part) => element("mark", { class: `kind-${kinds.indexOf(entity_group) % KINDS}` },
          part, element("small", {}, `${entity_group} ${percent(score)}`)),
      })))];
    },
  },
  {
    task: "entities",
    title: "Own entities",
    route: "/entities",
    fields: [
      { name: "text", label: "Text", value: "Ada Lovelace was born in London.", rows: 4 },
      { name: "labels", label: "Labels, one per line", value: "person\ncity", rows: 3 },
      { name: "threshold", label: "Least score", value: "0.5", kind: "text" },
    ],
    body: ({ text, labels, threshold }) => ({
      inputs: text, parameters: { labels: lines(labels), threshold: Number(threshold) },
    }),
    python: ({ text, labels, threshold }) =>
      `client.entities(${python(text)}, ${python(lines(labels))}, threshold=${Number(threshold)})`,
    show(entities, { text, labels }) {
      const kinds = lines(labels);
      if (!entities.length) return [element("p", {}, "No entity found.")];
      return [spanned(text, entities.map(({ label, score, start, end }) => ({
        start,
        end,
        make: (part) => element("mark", { class: `kind-${kinds.indexOf(label) % KINDS}` },
          part, element("small", {}, `${label} ${percent(score)}`)),
      })))];
    },
  },
  {
    task: "redact",
    exported: "token-classification",
    title: "Redaction",
    route: "/redact",
    fields: [
      { name: "text", label: "Text", value: "Ada Lovelace was born in London. Write to ada@example.org.", rows: 4 },
      { name: "labels", label: "Labels, one per line", value: "person\ncity", rows: 3, only: "entities" },
    ],
    body: (values) => ({
      inputs: values.text, parameters: { labels: replaced(values), patterns: PATTERNS },
    }),
    python(values) {
      const labels = replaced(values);
      return `client.redact(${python(values.text)}, ${labels ? `labels=${python(labels)}, ` : ""}patterns=${python(PATTERNS)})`;
    },
    show: ({ text, replacements }) => [spanned(text, replacements.map((replacement) => ({
      start: replacement.redacted_start,
      end: replacement.redacted_end,
      make: (part) => element("mark", { title: replacement.text }, part),
    })))],
  },
  {
    task: "text-classification",
    title: "Classes",
    route: "/classify",
    fields: [
      { name: "text", label: "Text", value: "The room was loud and the staff unfriendly.", rows: 4 },
      { name: "top", label: "Most labels", value: "5", kind: "number" },
      { name: "set", label: "Label set", choices: "label_sets" },
    ],
    body: ({ text, top, set }) => ({
      inputs: text, parameters: { top_k: Number(top), ...(set && { label_set: set }) },
    }),
    python: ({ text, top, set }) =>
      `client.classify(${python(text)}, top_k=${Number(top)}${set && `, label_set=${python(set)}`})`,
    show: ([labels]) => [bars(labels.map(({ label, score }) => ({ name: label, share: score })))],
  },
  {
    task: "zero-shot-classification",
    exported: "text-classification",
    title: "Own labels",
    route: "/zero-shot-classification",
    fields: [
      { name: "text", label: "Text", value: "The parliament passed the law.", rows: 4 },
      { name: "labels", label: "Labels, one per line", value: "politics\nsport\ncooking", rows: 4 },
    ],
    body: ({ text, labels }) => ({ inputs: text, parameters: { candidate_labels: lines(labels) } }),
    python: ({ text, labels }) => `client.zero_shot_classification(${python(text)}, ${python(lines(labels))})`,
    show: (labels) => [bars(labels.map(({ label, score }) => ({ name: label, share: score })))],
  },
  {
    task: "score",
    exported: "fill-mask",
    title: "Surprisal",
    route: "/score",
    fields: [{ name: "text", label: "Text", value: "He opened the door and walked into the sky.", rows: 4 }],
    body: ({ text }) => ({ inputs: text }),
    python: ({ text }) => `client.score(${python(text)})`,
    show({ score, tokens }, { text }) {
      const spans = tokens.map(({ token, start, end, log_probability }) => ({
        start,
        end,
        make: (part) => element("span", {
          class: "alarm",
          "--share": clamp(-log_probability / SURPRISING),
          title: `${token}: probability ${percent(Math.exp(log_probability))}`,
        }, part),
      }));
      const rarest = [...tokens].sort((a, b) => a.log_probability - b.log_probability);
      const rows = rarest.map(({ token, log_probability }) => ({ name: token, share: Math.exp(log_probability) }));
      return [
        spanned(text, spans),
        element("p", {}, `Log-likelihood ${score.toFixed(2)}, mean per token ${(score / tokens.length).toFixed(2)}.`),
        element("h3", {}, "The most surprising tokens and their probability"),
        bars(rows.slice(0, 5)),
        element("details", {}, element("summary", {}, "All tokens"), bars(rows)),
      ];
    },
  },
];
