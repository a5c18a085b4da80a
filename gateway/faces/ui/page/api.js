// What is asked of the server: JSON, an answer's stream, and the key it may want.

import { byId } from "./dom.js";

const KEY = "foretoken-api-key";
const MOST_EVENT_CHARS = 1 << 20;
const GARBLED = "The server's answer was not understood.";
const LET_GO = ["AbortError", "TimeoutError"];

/** A refusal or a failure, as a sentence; `status` is 0 where no answer came. */
export class Failure extends Error {
  constructor(message, status = 0, param = "") {
    super(message);
    this.status = status;
    this.param = param;
  }
}

let key = stored();
let asking = null; // while the dialog is open: everybody waits for the same answer
let declined = false;

/** The JSON at a path of this page. `quietly`: a key that was declined is not asked for again. */
export async function ask(path, { quietly = false, signal } = {}) {
  const response = await send(path, { signal }, quietly);
  try {
    return await response.json();
  } catch {
    throw new Failure(GARBLED);
  }
}

/** The events of a chat completion, each a parsed object. */
export async function* chat(body, sla, signal) {
  const headers = { "content-type": "application/json", "x-foretoken-sla": sla };
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await send("../v1/chat/completions", options, false);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = parsed(data);
    if (event.error) throw new Failure(sentence(event.error.message), 200);
    yield event;
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Failure(GARBLED);
  }
}

/** Ask for a key, whether or not one was declined before. */
export const changeKey = () => newKey(key, false);

async function send(path, options, quietly) {
  for (;;) {
    const used = key;
    const response = await reach(path, options, used);
    if (response.ok) return response;
    const wantsKey = response.status === 401;
    if (wantsKey) byId("give-key").hidden = false;
    if (!wantsKey || !(await newKey(used, quietly))) throw await failureOf(response);
  }
}

async function reach(path, options, used) {
  const headers = { ...options.headers, ...(used && { authorization: `Bearer ${used}` }) };
  try {
    return await fetch(path, { ...options, headers });
  } catch (error) {
    if (LET_GO.includes(error.name)) throw error;
    throw new Failure("The server cannot be reached. Does it still run?");
  }
}

/** Whether there is another key to try than the one that was `refused`. */
async function newKey(refused, quietly) {
  if (key !== refused) return true;
  if (quietly && declined) return false;
  asking ??= askForKey().finally(() => (asking = null));
  const given = await asking;
  declined = !given;
  if (given) keep(given);
  return Boolean(given);
}

function askForKey() {
  const dialog = byId("key-dialog");
  const text = byId("key-text");
  text.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const onClose = () => resolve(dialog.returnValue === "use" ? text.value.trim() : "");
    dialog.addEventListener("close", onClose, { once: true });
  });
}

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage is forbidden: the key lives as long as the page
  }
}

function keep(given) {
  key = given;
  try {
    sessionStorage.setItem(KEY, given);
  } catch {
    // as above
  }
}

async function failureOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // a proxy's page, say
  }
  const said = error.message ?? `the server answered ${response.status}`;
  const wait = Number(response.headers.get("retry-after"));
  const again = wait > 0 ? ` Try again in ${wait} s.` : "";
  return new Failure(sentence(said) + again, response.status, error.param ?? "");
}

export function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

/** The data of server-sent events; an event's end is an empty line. */
async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = done ? "" : blocks.pop();
      if (rest.length > MOST_EVENT_CHARS) throw new Failure(GARBLED);
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        const data = lines.map((line) => line.slice(5).trim()).join("\n");
        if (data) yield data;
      }
      if (done) throw new Failure("The connection ended before the answer did.");
    }
  } catch (error) {
    if (error instanceof Failure || LET_GO.includes(error.name)) throw error;
    throw new Failure("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
