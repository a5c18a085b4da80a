// The system prompt and sampling settings of the chat, kept in localStorage.

import { byId, setText } from "./dom.js";

const PREFIX = "foretoken-chat-";
const FIELDS = ["system-prompt", "temperature"];

export class ChatSettings {
  constructor() {
    for (const name of FIELDS) {
      const input = byId(name);
      input.value = read(name);
      input.addEventListener("input", () => {
        write(name, input.value.trim());
        this.summarize();
      });
    }
    this.summarize();
  }

  /** The system message, as a list of at most one. */
  get messages() {
    const content = byId("system-prompt").value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  /** Request fields; an empty setting is left to the server. */
  get fields() {
    const temperature = byId("temperature").value.trim();
    return temperature ? { temperature: Number(temperature) } : {};
  }

  summarize() {
    const active = [];
    if (this.messages.length) active.push("system prompt");
    if ("temperature" in this.fields) active.push(`temperature ${this.fields.temperature}`);
    setText(byId("settings-summary"), active.length ? `: ${active.join(", ")}` : "");
  }
}

function read(name) {
  try {
    return localStorage.getItem(PREFIX + name) ?? "";
  } catch {
    return ""; // storage is disabled: settings last as long as the page
  }
}

function write(name, value) {
  try {
    if (value) localStorage.setItem(PREFIX + name, value);
    else localStorage.removeItem(PREFIX + name);
  } catch {
    // storage is disabled
  }
}
