// Starts the page and shows one of its views.

import { RequestError, changeKey, fetchJson, ofModel } from "./api.js";
import { BoardView } from "./board.js";
import { ChatView } from "./chat.js";
import { byId, setText, showMessage } from "./dom.js";
import { WhyView } from "./why.js";

const VIEWS = ["chat", "board", "why"];
const RETRY_MS = 3000;

const why = new WhyView();
const board = new BoardView();
const chat = new ChatView((id) => why.addRecent(id));
let chosen = ""; // model; empty: the server's first

/** Shows the view of `#board` or `#why/ID`; anything else is the chat. */
function showView() {
  if (location.hash === "#main") return byId("main").focus();
  const [name, id = ""] = location.hash.slice(1).split("/");
  const view = VIEWS.includes(name) ? name : "chat";
  for (const each of VIEWS) {
    byId(`view-${each}`).hidden = each !== view;
    const link = document.querySelector(`nav a[href="#${each}"]`);
    if (each === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · foretoken`;
  board.show(view === "board");
  if (view === "chat" && matchMedia("(pointer: fine)").matches) byId("message").focus({ preventScroll: true });
  if (view === "why") why.load(decode(id));
}

function decode(id) {
  try {
    return decodeURIComponent(id);
  } catch {
    return id;
  }
}

/** Shows the chosen model, as a list if there are several. */
function drawModels({ model, models = [] }) {
  const list = byId("models");
  setText(byId("model"), model);
  list.hidden = models.length < 2;
  byId("model").hidden = !list.hidden;
  list.replaceChildren(...models.map((each) => new Option(each, each, false, each === model)));
}

/** Loads the description of the chosen model; retries until it succeeds. */
async function loadDescription(failures = 0) {
  const asked = chosen;
  try {
    const about = await fetchJson(ofModel("about", asked), { quiet: true });
    if (asked !== chosen) return;
    drawModels(about);
    chat.configure(about);
    board.configure(about);
    board.drawPreset((await fetchJson(ofModel("board", asked), { quiet: true })).preset);
    if (failures) showMessage(byId("chat-error"), "");
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    showMessage(byId("chat-error"), error.message);
    if (error.status === 404) chosen = ""; // a restarted server has other models
    if (error.status !== 401) setTimeout(loadDescription, RETRY_MS, failures + 1);
  }
}

byId("give-key").addEventListener("click", async () => {
  if (await changeKey()) loadDescription(1);
});
byId("models").addEventListener("change", (event) => {
  chosen = event.target.value;
  loadDescription();
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
addEventListener("hashchange", showView);
showView();
loadDescription();
