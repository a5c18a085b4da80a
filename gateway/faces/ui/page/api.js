// Requests to the server: JSON, answer streams, and the API key.

import { byId, showMessage } from "./dom.js";

const STORAGE_KEY = "foretoken-api-key";
const MAX_EVENT_CHARS = 1 << 20;
const INVALID_ANSWER = "The server's answer is not valid.";
const WRONG_KEY = "The key was not accepted.";
const ABORTED = ["AbortError", "TimeoutError"];

/** A refused or failed request, as a sentence; `status` is 0 if no response arrived. */
export class RequestError extends Error {
  constructor(message, status = 0, param = "") {
    super(message);
    this.status = status;
    this.param = param;
  }
}

let key = readStoredKey();
let openPrompt = null; // all requests wait for the same key dialog
let declined = false;

/** The JSON at a path relative to this page. `quiet`: do not ask again for a key the user declined. */
export async function fetchJson(path, { quiet = false, signal } = {}) {
  const response = await send(path, { signal }, quiet);
  try {
    return await response.json();
  } catch {
    throw new RequestError(INVALID_ANSWER);
  }
}

/** The path of the data of a model; without a name, of the server's first. */
export const ofModel = (path, model) => (model ? `${path}?model=${encodeURIComponent(model)}` : path);

/** The parsed events of a streamed chat completion. */
export async function* streamChat(body, sla, signal) {
  const headers = { "content-type": "application/json", "x-foretoken-sla": sla };
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await send("../v1/chat/completions", options, false);
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = parseEvent(data);
    if (event.error) throw new RequestError(toSentence(event.error.message), 200);
    yield event;
  }
}

function parseEvent(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new RequestError(INVALID_ANSWER);
  }
}

/** Asks for a key even if the user declined before. True if there is a new key. */
export const changeKey = () => promptForNewKey("", false);

async function send(path, options, quiet) {
  for (;;) {
    const used = key;
    const response = await fetchWithKey(path, options, used);
    if (response.ok) return response;
    if (response.status !== 401) throw await toRequestError(response);
    byId("give-key").hidden = false;
    const changed = key !== used; // another request has asked for a key in the meantime
    if (!changed && !(await promptForNewKey(used && WRONG_KEY, quiet))) throw await toRequestError(response);
  }
}

async function fetchWithKey(path, options, used) {
  const headers = { ...options.headers, ...(used && { authorization: `Bearer ${used}` }) };
  try {
    return await fetch(path, { ...options, headers });
  } catch (error) {
    if (ABORTED.includes(error.name)) throw error;
    throw new RequestError("The server cannot be reached. Check that it is running.");
  }
}

/** Shows the key dialog with an error, if any. False if the user cancels. */
async function promptForNewKey(error, quiet) {
  if (quiet && declined) return false;
  openPrompt ??= showKeyDialog(error).finally(() => (openPrompt = null));
  const entered = await openPrompt;
  declined = !entered;
  if (entered) storeKey(entered);
  return Boolean(entered);
}

function showKeyDialog(error) {
  const dialog = byId("key-dialog");
  const input = byId("key-text");
  input.value = "";
  input.setAttribute("aria-invalid", String(Boolean(error)));
  showMessage(byId("key-error"), error);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const onClose = () => resolve(dialog.returnValue === "use" ? input.value.trim() : "");
    dialog.addEventListener("close", onClose, { once: true });
  });
}

function readStoredKey() {
  try {
    return sessionStorage.getItem(STORAGE_KEY) ?? "";
  } catch {
    return ""; // storage is disabled: the key lasts as long as the page
  }
}

function storeKey(entered) {
  key = entered;
  try {
    sessionStorage.setItem(STORAGE_KEY, entered);
  } catch {
    // storage is disabled
  }
}

async function toRequestError(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not JSON, such as a proxy's error page
  }
  const message = error.message ?? `the server answered with status ${response.status}`;
  const wait = Number(response.headers.get("retry-after"));
  const retry = wait > 0 ? ` Try again in ${wait} s.` : "";
  return new RequestError(toSentence(message) + retry, response.status, error.param ?? "");
}

export function toSentence(text) {
  const capitalized = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(capitalized) ? capitalized : `${capitalized}.`;
}

/** The data of server-sent events. An empty line ends an event. */
async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = done ? "" : blocks.pop();
      if (rest.length > MAX_EVENT_CHARS) throw new RequestError(INVALID_ANSWER);
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        const data = lines.map((line) => line.slice(5).trim()).join("\n");
        if (data) yield data;
      }
      if (done) throw new RequestError("The connection ended before the answer was complete.");
    }
  } catch (error) {
    if (error instanceof RequestError || ABORTED.includes(error.name)) throw error;
    throw new RequestError("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
