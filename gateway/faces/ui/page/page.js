// The page: which view is shown, and who learns of what.

import { Failure, ask, changeKey } from "./api.js";
import { Board } from "./board.js";
import { Chat } from "./chat.js";
import { byId, say, write } from "./dom.js";
import { Why } from "./why.js";

const VIEWS = ["chat", "board", "why"];
const RETRY_MS = 3000;

const why = new Why();
const board = new Board();
const chat = new Chat((id) => why.remember(id));

/** `#board`, or `#why/ID`; anything else is the chat. */
function route() {
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
  if (view === "why") why.tell(decoded(id));
}

function decoded(id) {
  try {
    return decodeURIComponent(id);
  } catch {
    return id;
  }
}

/** Until the server has told of itself. */
async function introduce(failures = 0) {
  try {
    const told = await ask("about", { quietly: true });
    write(byId("model"), told.model);
    chat.know(told);
    board.know(told);
    board.drawPreset((await ask("board", { quietly: true })).preset);
    if (failures) say(byId("chat-error"), "");
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    say(byId("chat-error"), error.message);
    if (error.status !== 401) setTimeout(introduce, RETRY_MS, failures + 1);
  }
}

byId("give-key").addEventListener("click", async () => {
  if (await changeKey()) introduce(1);
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
addEventListener("hashchange", route);
route();
introduce();
