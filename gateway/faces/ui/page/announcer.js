// Announces a growing answer to screen readers: complete sentences at intervals, not every token.

const INTERVAL_MS = 2500;
const MAX_CHARS = 400; // without a sentence end
const MAX_LINES = 20; // in the page; older ones are removed
const SENTENCE_END = /[.!?\n]["')\]]?\s/g;

export class Announcer {
  constructor(target) {
    this.target = target;
    this.pending = "";
    this.announcedAt = 0;
  }

  add(text) {
    this.pending += text;
    const now = performance.now();
    if (now - this.announcedAt < INTERVAL_MS) return;
    const end = [...this.pending.matchAll(SENTENCE_END)].at(-1);
    const length = end ? end.index + end[0].length : this.pending.length > MAX_CHARS ? this.pending.length : 0;
    if (!length) return;
    this.announce(this.pending.slice(0, length));
    this.pending = this.pending.slice(length);
    this.announcedAt = now;
  }

  end(summary) {
    this.announce(`${this.pending} ${summary}`);
    this.pending = "";
  }

  announce(text) {
    if (!text.trim()) return;
    const line = document.createElement("p");
    line.textContent = text.trim();
    this.target.append(line);
    while (this.target.childElementCount > MAX_LINES) this.target.firstElementChild.remove();
  }
}
