// Makes the elements that the panels share. Text is never parsed as HTML.

/** Returns an element; a property that starts with "--" becomes a style. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("--")) made.style.setProperty(name, value);
    else if (name === "class") made.className = value;
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Returns a list of bars for rows of {name, share}, with shares from 0 to 1. */
export function bars(rows) {
  const items = rows.map(({ name, share }) =>
    element("li", {},
      element("span", { class: "name" }, name),
      element("span", { class: "track" }, element("span", { "--share": clamp(share) })),
      element("span", { class: "number" }, percent(share))));
  return element("ul", { class: "bars" }, ...items);
}

/** Returns a paragraph of a text whose spans are replaced by elements.
 *
 * Spans are {start, end, make}, in characters as the server counts them: code points.
 */
export function spanned(text, spans) {
  const characters = Array.from(text);
  const paragraph = element("p", { class: "text" });
  let at = 0;
  for (const { start, end, make } of spans) {
    if (start < at) continue; // another token of the same character
    paragraph.append(characters.slice(at, start).join(""));
    paragraph.append(make(characters.slice(start, end).join("")));
    at = end;
  }
  paragraph.append(characters.slice(at).join(""));
  return paragraph;
}

export const clamp = (number) => Math.min(1, Math.max(0, number));

/** Returns a number with its unit, which stay on one line. */
export const measured = (number, unit) => `${number}\u00a0${unit}`;

export const percent = (share) => measured((share * 100).toFixed(share < 0.1 ? 2 : 1), "%");
