// Making and filling elements, and how numbers are written.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with properties (attributes where a name has a dash) and children. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

export function drawn(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** A sentence in its place, or nothing there. */
export function say(place, text) {
  place.textContent = text;
  place.hidden = !text;
}

/** Only what has changed is written: what reads the page aloud is not woken for nothing. */
export function write(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${Math.round(value * 1000)}\u00a0ms`;
  if (value < 9.95) return `${value.toFixed(value < 0.995 ? 2 : 1)}\u00a0s`;
  if (value < 119.5) return `${Math.round(value)}\u00a0s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)}\u00a0s`;
}

export const whole = (value) => Math.round(value).toLocaleString("en");

export const share = (part, all) => (all > 0 ? part / all : 0);

export const percent = (ratio) => `${Math.round(ratio * 100)}\u00a0%`;

export const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;
