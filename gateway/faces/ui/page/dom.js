// Creates and fills elements, and formats numbers.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with properties (attributes where a name has a dash) and children. */
export function element(tag, properties = {}, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) created.setAttribute(name, value);
    else created[name] = value;
  }
  created.append(...children);
  return created;
}

export function svgElement(tag, attributes) {
  const created = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) created.setAttribute(name, value);
  return created;
}

/** Shows a message, or hides its element if the text is empty. */
export function showMessage(target, text) {
  target.textContent = text;
  target.hidden = !text;
}

/** Writes only changed text, so that screen readers do not announce it again. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${Math.round(value * 1000)}\u00a0ms`;
  if (value < 9.95) return `${value.toFixed(value < 0.995 ? 2 : 1)}\u00a0s`;
  if (value < 119.5) return `${Math.round(value)}\u00a0s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)}\u00a0s`;
}

export const integer = (value) => Math.round(value).toLocaleString("en");

export const fraction = (part, total) => (total > 0 ? part / total : 0);

export const percent = (ratio) => `${Math.round(ratio * 100)}\u00a0%`;

export const plural = (count, one, many = `${one}s`) => `${integer(count)} ${count === 1 ? one : many}`;
