// The board: queue, running requests, KV blocks by worker, SLA attainment, preset. Polled each second.

import { RequestError, fetchJson, ofModel } from "./api.js";
import { byId, element, fraction, integer, percent, plural, seconds, setText, showMessage, svgElement } from "./dom.js";

const POLL_EVERY_MS = 1000;
const TIMEOUT_MS = 8000;
const STALE_S = 5;
const MAX_SAMPLES = 120; // of the trend: two minutes
const CARDS = [
  ["running", "Running", (board) => integer(board.running)],
  ["queued", "Waiting", (board) => integer(board.queued)],
  ["drain", "Queue drains in", (board) => (board.queued ? seconds(board.drain_s) : "–")],
  ["workers", "Workers", (board) => integer(board.worker_count)],
  ["kv", "KV in use", (board) => percent(fraction(sum(board.workers, "held_tokens"), sum(board.workers, "kv_tokens")))],
  ["attainment", "SLA attainment", (board) => attainment(Object.values(board.classes))],
];

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);

export class BoardView {
  constructor() {
    this.samples = [];
    this.presets = [];
    this.budgets = {};
    this.model = "";
    this.timer = 0;
    this.polls = 0;
    this.shown = false;
    this.cards = new Map();
    for (const [id, name] of CARDS) {
      const value = element("dd", { textContent: "–", id: `card-${id}` });
      this.cards.set(id, value);
      byId("cards").append(element("div", {}, element("dt", { textContent: name }), value));
    }
    document.addEventListener("visibilitychange", () => this.poll());
  }

  configure({ model, presets, classes }) {
    this.presets = presets;
    this.budgets = classes;
    if (model === this.model) return;
    this.model = model;
    this.samples = []; // those of another model
    this.poll();
  }

  /** Polls the server only while the board is visible. */
  show(shown) {
    this.shown = shown;
    this.poll();
  }

  poll() {
    clearTimeout(this.timer);
    this.polls += 1;
    if (this.shown && !document.hidden) this.refresh();
  }

  async refresh() {
    const poll = ++this.polls; // the answer to an earlier poll is dropped
    try {
      const board = await fetchJson(ofModel("board", this.model), { quiet: true, signal: AbortSignal.timeout(TIMEOUT_MS) });
      if (this.polls === poll) this.draw(board);
    } catch (error) {
      const message = error instanceof RequestError ? error.message : `No answer within ${TIMEOUT_MS / 1000} s.`;
      if (this.polls === poll) showMessage(byId("board-error"), message);
    }
    if (this.polls === poll) this.timer = setTimeout(() => this.poll(), POLL_EVERY_MS);
  }

  draw(board) {
    showMessage(byId("board-error"), describeTrouble(board));
    setText(byId("board-age"), board.age_s === null ? "" : `as of ${formatTime(board.age_s)}`);
    for (const [id, , text] of CARDS) setText(this.cards.get(id), text(board));
    this.drawTrend(board);
    this.drawWorkers(board);
    this.drawAttainment(board);
    this.drawPreset(board.preset);
  }

  drawTrend({ running, queued }) {
    this.samples = [...this.samples, [running, queued]].slice(-MAX_SAMPLES);
    const most = Math.max(4, ...this.samples.flat());
    const from = MAX_SAMPLES - this.samples.length;
    const points = (which) =>
      this.samples.map((sample, at) => `${from + at + 1},${(98 - (sample[which] / most) * 92).toFixed(1)}`);
    const runningPoints = points(0);
    byId("trend").replaceChildren(
      svgElement("polygon", { points: `${from + 1},98 ${runningPoints.join(" ")} ${MAX_SAMPLES},98`, class: "area" }),
      svgElement("polyline", { points: runningPoints.join(" "), class: "line" }),
      svgElement("polyline", { points: points(1).join(" "), class: "expected" }),
    );
    setText(byId("trend-scale"), `up to ${integer(most)} · last ${plural(this.samples.length, "sample")}`);
  }

  drawWorkers({ workers, worker_count: count }) {
    const place = byId("workers");
    const existing = new Map([...place.children].map((item) => [item.dataset.id, item]));
    const items = workers.map((worker) => drawWorker(existing.get(worker.id) ?? workerItem(worker), worker));
    if (!count) items.push(element("li", { className: "note", textContent: "No worker is attached." }));
    const more = count - workers.length;
    if (more > 0) items.push(element("li", { className: "note", textContent: `and ${integer(more)} more` }));
    place.replaceChildren(...items);
  }

  drawAttainment({ classes, window_s: window }) {
    const names = [...new Set([...Object.keys(this.budgets), ...Object.keys(classes)])];
    byId("sla-rows").replaceChildren(...names.map((name) => attainmentRow(name, classes[name], window)));
  }

  drawPreset(name) {
    const chip = byId("preset");
    chip.hidden = !name;
    chip.ariaLabel = `preset ${name}`;
    chip.replaceChildren(element("span", { className: "word", textContent: "preset " }), name);
    const preset = this.presets.find((each) => each.name === name);
    const about = preset ? `: ${preset.about}` : " (a custom preset)";
    byId("preset-current").replaceChildren(element("strong", { textContent: name || "–" }), name ? `${about}.` : "");
    setText(byId("preset-list-title"), `All ${plural(this.presets.length, "preset")}`);
    const list = byId("presets");
    if (list.dataset.on === name && list.childElementCount === this.presets.length) return;
    list.dataset.on = name;
    list.replaceChildren(...this.presets.map((each) => presetItem(each, each.name === name)));
  }
}

function describeTrouble({ ready, draining, age_s: age, worker_count: workers }) {
  if (draining) return "The server is shutting down: it finishes running requests and refuses new ones.";
  if (age === null) return "The scheduler cannot be reached.";
  if (age > STALE_S) return `No update from the scheduler for ${seconds(age)}; the values are that old.`;
  if (!workers) return "No worker is attached: the server refuses requests.";
  return ready ? "" : "The server refuses requests at present.";
}

const formatTime = (age) => new Date(Date.now() - age * 1000).toLocaleTimeString("en-GB");

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

function drawWorker(item, { model, running, kv_tokens: total, held_tokens: held, block_tokens: block }) {
  const [name, meter, detail] = item.children;
  const used = fraction(held, total);
  setText(name.lastElementChild, `${model} · ${integer(running)} running`);
  meter.style.setProperty("--used", `${Math.min(100, used * 100)}%`);
  meter.setAttribute("aria-valuemax", String(total));
  meter.setAttribute("aria-valuenow", String(held));
  const blocks = block ? `${integer(Math.ceil(held / block))} of ${integer(Math.floor(total / block))} blocks, ` : "";
  setText(detail, `${percent(used)} · ${blocks}${integer(held)} of ${integer(total)} tokens`);
  return item;
}

const countMissed = (counts) => Object.values(counts.missed).reduce((total, count) => total + count, 0);

function attainment(rows) {
  const met = sum(rows, "met");
  const total = met + rows.reduce((count, row) => count + countMissed(row), 0);
  return total ? percent(met / total) : "–";
}

/** Explicit roles: on a narrow screen the style sheet turns rows into grids, which hides them otherwise. */
function attainmentRow(name, counts, window) {
  const cell = (textContent, className = "") => element("td", { textContent, className, role: "cell" });
  const head = element("th", { scope: "row", role: "rowheader", textContent: name });
  const row = (...cells) => element("tr", { role: "row" }, head, ...cells);
  if (!counts) return row(cell("–"), cell("0", "number"), cell("–", "number"), cell("", "causes"));
  const total = counts.met + countMissed(counts);
  const causes = Object.entries(counts.missed).sort((a, b) => b[1] - a[1]);
  const meter = element("div", { className: "meter", "aria-hidden": "true" }, element("div", { className: "fill" }));
  meter.style.setProperty("--used", `${fraction(counts.met, total) * 100}%`);
  const ratio = cell("", "met");
  ratio.append(element("span", { textContent: percent(fraction(counts.met, total)) }), meter);
  return row(
    ratio,
    cell(integer(total), "number"),
    cell(`${integer(counts.good_tokens / window)} tok/s`, "number"),
    cell(causes.map(([cause, count]) => `${cause} ${integer(count)}`).join(", "), "causes"),
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
