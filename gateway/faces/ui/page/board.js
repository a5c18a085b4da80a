// The board: queue, running, KV blocks by worker, SLAs kept, the preset; asked for each second.

import { Failure, ask } from "./api.js";
import { byId, drawn, element, percent, plural, say, seconds, share, whole, write } from "./dom.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 8000;
const STALE_S = 5;
const MOST_SAMPLES = 120; // of the trend: two minutes
const CARDS = [
  ["running", "Running", (told) => whole(told.running)],
  ["queued", "Waiting", (told) => whole(told.queued)],
  ["drain", "Queue drains in", (told) => (told.queued ? seconds(told.drain_s) : "–")],
  ["workers", "Workers", (told) => whole(told.worker_count)],
  ["kv", "KV in use", (told) => percent(share(sum(told.workers, "held_tokens"), sum(told.workers, "kv_tokens")))],
  ["kept", "SLAs kept", (told) => attained(Object.values(told.classes))],
];

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);

export class Board {
  constructor() {
    this.samples = [];
    this.presets = [];
    this.budgets = {};
    this.timer = 0;
    this.turn = 0;
    this.shown = false;
    this.cards = new Map();
    for (const [id, name] of CARDS) {
      const value = element("dd", { textContent: "–", id: `card-${id}` });
      this.cards.set(id, value);
      byId("cards").append(element("div", {}, element("dt", { textContent: name }), value));
    }
    document.addEventListener("visibilitychange", () => this.look());
  }

  know({ presets, classes }) {
    this.presets = presets;
    this.budgets = classes;
  }

  /** Whether the board is what is looked at: only then it is asked for. */
  show(shown) {
    this.shown = shown;
    this.look();
  }

  look() {
    clearTimeout(this.timer);
    this.turn += 1;
    if (this.shown && !document.hidden) this.refresh();
  }

  async refresh() {
    const mine = ++this.turn; // an answer to an earlier one counts no more
    try {
      const told = await ask("board", { quietly: true, signal: AbortSignal.timeout(PATIENCE_MS) });
      if (this.turn === mine) this.draw(told);
    } catch (error) {
      if (this.turn === mine) say(byId("board-error"), error instanceof Failure ? error.message : "The server is slow to answer.");
    }
    if (this.turn === mine) this.timer = setTimeout(() => this.look(), EVERY_MS);
  }

  draw(told) {
    say(byId("board-error"), trouble(told));
    write(byId("board-age"), told.age_s === null ? "" : `as of ${clock(told.age_s)}`);
    for (const [id, , text] of CARDS) write(this.cards.get(id), text(told));
    this.drawTrend(told);
    this.drawWorkers(told);
    this.drawAttained(told);
    this.drawPreset(told.preset);
  }

  drawTrend({ running, queued }) {
    this.samples = [...this.samples, [running, queued]].slice(-MOST_SAMPLES);
    const most = Math.max(4, ...this.samples.flat());
    const from = MOST_SAMPLES - this.samples.length;
    const points = (which) =>
      this.samples.map((sample, at) => `${from + at + 1},${(98 - (sample[which] / most) * 92).toFixed(1)}`);
    const ran = points(0);
    byId("trend").replaceChildren(
      drawn("polygon", { points: `${from + 1},98 ${ran.join(" ")} ${MOST_SAMPLES},98`, class: "area" }),
      drawn("polyline", { points: ran.join(" "), class: "line" }),
      drawn("polyline", { points: points(1).join(" "), class: "expected" }),
    );
    write(byId("trend-scale"), `up to ${whole(most)} · last ${plural(this.samples.length, "look")}`);
  }

  drawWorkers({ workers, worker_count: count }) {
    const place = byId("workers");
    const seen = new Map([...place.children].map((item) => [item.dataset.id, item]));
    const items = workers.map((worker) => drawWorker(seen.get(worker.id) ?? workerItem(worker), worker));
    if (!count) items.push(element("li", { className: "note", textContent: "No worker is attached." }));
    const more = count - workers.length;
    if (more > 0) items.push(element("li", { className: "note", textContent: `and ${whole(more)} more` }));
    place.replaceChildren(...items);
  }

  drawAttained({ classes, window_s: window }) {
    const names = [...new Set([...Object.keys(this.budgets), ...Object.keys(classes)])];
    byId("attained").replaceChildren(...names.map((name) => attainedRow(name, classes[name], window)));
  }

  drawPreset(name) {
    const chip = byId("preset");
    chip.hidden = !name;
    chip.ariaLabel = `preset ${name}`;
    chip.replaceChildren(element("span", { className: "word", textContent: "preset " }), name);
    const known = this.presets.find((each) => each.name === name);
    const about = known ? `: ${known.about}` : ", which is none of those that ship";
    byId("preset-on").replaceChildren(element("strong", { textContent: name || "–" }), name ? `${about}.` : "");
    write(byId("preset-others"), `${plural(this.presets.length, "preset")} that ship`);
    const list = byId("presets");
    if (list.dataset.on === name && list.childElementCount === this.presets.length) return;
    list.dataset.on = name;
    list.replaceChildren(...this.presets.map((each) => presetItem(each, each.name === name)));
  }
}

function trouble({ ready, draining, age_s: age, worker_count: workers }) {
  if (draining) return "The server is shutting down: it finishes what it has and takes nothing new.";
  if (age === null) return "The scheduler cannot be reached.";
  if (age > STALE_S) return `The scheduler has said nothing for ${seconds(age)}; this is what it said then.`;
  if (!workers) return "No worker is attached: requests would be refused.";
  return ready ? "" : "The server takes no requests now.";
}

const clock = (age) => new Date(Date.now() - age * 1000).toLocaleTimeString("en-GB");

function workerItem(worker) {
  const item = element(
    "li",
    {},
    element("p", { className: "name" }, element("strong", { textContent: worker.id }), element("span", { className: "note" })),
    element("div", { className: "meter", role: "meter", "aria-valuemin": "0", "aria-label": `KV of ${worker.id}` },
      element("div", { className: "fill" })),
    element("p", { className: "detail" }),
  );
  item.dataset.id = worker.id;
  return item;
}

function drawWorker(item, { model, running, kv_tokens: all, held_tokens: held, block_tokens: block }) {
  const [name, meter, detail] = item.children;
  const used = share(held, all);
  write(name.lastElementChild, `${model} · ${whole(running)} running`);
  meter.style.setProperty("--spent", `${Math.min(100, used * 100)}%`);
  meter.setAttribute("aria-valuemax", String(all));
  meter.setAttribute("aria-valuenow", String(held));
  const blocks = block ? `${whole(Math.ceil(held / block))} of ${whole(Math.floor(all / block))} blocks, ` : "";
  write(detail, `${percent(used)} · ${blocks}${whole(held)} of ${whole(all)} tokens`);
  return item;
}

const missedOf = (kept) => Object.values(kept.missed).reduce((total, count) => total + count, 0);

function attained(rows) {
  const met = sum(rows, "met");
  const all = met + rows.reduce((total, row) => total + missedOf(row), 0);
  return all ? percent(met / all) : "–";
}

function attainedRow(name, kept, window) {
  const cell = (textContent, className = "") => element("td", { textContent, className });
  const head = element("th", { scope: "row", textContent: name });
  if (!kept) return element("tr", {}, head, cell("–"), cell("0", "number"), cell("–", "number"), cell(""));
  const missed = missedOf(kept);
  const all = kept.met + missed;
  const causes = Object.entries(kept.missed).sort((a, b) => b[1] - a[1]);
  const meter = element("div", { className: "meter", "aria-hidden": "true" }, element("div", { className: "fill" }));
  meter.style.setProperty("--spent", `${share(kept.met, all) * 100}%`);
  const ratio = element("td", { className: "kept" }, element("span", { textContent: percent(share(kept.met, all)) }), meter);
  return element(
    "tr", {}, head, ratio, cell(whole(all), "number"),
    cell(`${whole(kept.good_tokens / window)} tok/s`, "number"),
    cell(causes.map(([cause, count]) => `${cause} ${whole(count)}`).join(", ")),
  );
}

function presetItem({ name, about }, on) {
  const item = element("li", {}, element("strong", { textContent: name }), ` ${about}`);
  if (on) {
    item.setAttribute("aria-current", "true");
    item.append(element("span", { className: "chip", textContent: "on" }));
  }
  return item;
}
