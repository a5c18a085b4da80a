// Renders a subset of Markdown as DOM nodes: headings, paragraphs, lists, quotes, tables, code, rules,
// emphasis and links. Text becomes text nodes only: HTML in an answer is never interpreted.

import { element } from "./dom.js";

const MAX_DEPTH = 6; // of nested lists, quotes and emphasis; deeper text stays plain
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const INDENTED = /^ {2,}\S/;
const TABLE_RULE = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:?)? *$/;
const STARTS_BLOCK = [FENCE, HEADING, RULE, QUOTE, ITEM];
// Groups: escaped character, backticks, emphasis, bracket of a link or image, bare URL.
const MARK = /\\([!-/:-@[-`{-~])|(`+)|(\*\*|__|~~|\*|_)|(!?\[)|(https?:\/\/[^\s<>"'`]+)/g;
const LINK_TARGET = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'][^"']*["'])?\s*\)/;
const MAX_TARGET_CHARS = 2048;
const SAFE_LINK = /^(?:https?:\/\/|mailto:)/i;
const URL_END = /[.,;:!?)\]*_~]+$/;
const EMPHASIS = { "**": "strong", __: "strong", "~~": "s", "*": "em", _: "em" };
const WORD = /[\p{L}\p{N}]/u;

/** Shows Markdown in an element. Blocks that have not changed keep their nodes. */
export class MarkdownView {
  constructor(target) {
    this.target = target;
    this.sources = [];
  }

  render(text) {
    const blocks = parseBlocks(text.split("\n"));
    const sources = blocks.map(({ kind, lines }) => `${kind}\n${lines.join("\n")}`);
    let same = 0;
    while (same < this.sources.length && sources[same] === this.sources[same]) same += 1;
    while (this.target.childNodes.length > same) this.target.lastChild.remove();
    this.target.append(...blocks.slice(same).map((block) => renderBlock(block, 0)));
    this.sources = sources;
  }
}

/** Blocks as {kind, lines}; a code block also has its language. O(lines). */
function parseBlocks(lines) {
  const blocks = [];
  let at = 0;
  const collectWhile = (holds) => {
    const from = at++;
    while (at < lines.length && holds(lines[at], at)) at += 1;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) {
      const closes = (each) => each.trim().length >= fence[1].length && !each.trim().replaceAll(fence[1][0], "");
      blocks.push({ kind: "code", language: fence[2], lines: collectWhile((each) => !closes(each)) });
      at += 1; // the closing fence
    } else if (HEADING.test(line)) blocks.push({ kind: "heading", lines: [lines[at++]] });
    else if (RULE.test(line)) blocks.push({ kind: "rule", lines: [lines[at++]] });
    else if (QUOTE.test(line)) blocks.push({ kind: "quote", lines: collectWhile((each) => QUOTE.test(each)) });
    else if (ITEM.test(line)) {
      const first = ITEM.exec(line);
      const continues = (each, index) => each.trim() || continuesList(lines[index + 1] ?? "");
      blocks.push({ kind: "list", lines: collectWhile((each, index) => continues(each, index) && !endsList(each, first)) });
    } else if (isTable(lines, at)) {
      blocks.push({ kind: "table", lines: collectWhile((each) => each.includes("|")) });
    } else {
      const holds = (each, index) => each.trim() && !startsBlock(each) && !isTable(lines, index);
      blocks.push({ kind: "paragraph", lines: collectWhile(holds) });
    }
  }
  return blocks;
}

const startsBlock = (line) => STARTS_BLOCK.some((start) => start.test(line));
const continuesList = (line) => ITEM.test(line) || INDENTED.test(line);

/** Whether a line starts another block, or a list of the other kind, behind a list's first item. */
function endsList(line, first) {
  if (!continuesList(line)) return line.trim() && startsBlock(line);
  const item = ITEM.exec(line);
  return item && item[1].length < first[1].length + 2 && isNumber(item[2]) !== isNumber(first[2]);
}

const isNumber = (marker) => /\d/.test(marker);
const isTable = (lines, at) => lines[at].includes("|") && TABLE_RULE.test(lines[at + 1] ?? "");

function renderBlock({ kind, lines, language }, depth) {
  return RENDERERS[kind](lines, depth, language);
}

const RENDERERS = {
  code: ([, ...lines], depth, language) => {
    const code = element("code", { textContent: lines.join("\n") });
    if (language) code.dataset.language = language;
    return element("pre", { tabIndex: 0 }, code);
  },
  heading: ([line]) => {
    const [, marks, text] = HEADING.exec(line);
    return element(`h${Math.min(6, marks.length + 3)}`, {}, ...renderInline(text, 0)); // below the page's own
  },
  rule: () => element("hr"),
  quote: (lines, depth) => element("blockquote", {}, ...renderNested(lines.map((line) => line.replace(QUOTE, "")), depth)),
  list: renderList,
  table: renderTable,
  paragraph: (lines) => element("p", {}, ...renderInline(lines.join("\n"), 0)),
};

function renderNested(lines, depth) {
  if (depth >= MAX_DEPTH) return [element("p", { textContent: lines.join("\n") })];
  return parseBlocks(lines).map((block) => renderBlock(block, depth + 1));
}

function renderList(lines, depth) {
  const [, , marker] = ITEM.exec(lines[0]);
  const indent = ITEM.exec(lines[0])[1].length;
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length < indent + 2) items.push({ width: match[0].length, lines: [line.slice(match[0].length)] });
    else items.at(-1).lines.push(dedent(line, items.at(-1).width));
  }
  const ordered = isNumber(marker);
  const list = element(ordered ? "ol" : "ul", {}, ...items.map((item) => renderItem(item.lines, depth)));
  if (ordered) list.start = parseInt(marker, 10);
  return list;
}

const dedent = (line, width) => line.slice(Math.min(width, line.length - line.trimStart().length));

/** A list item. The text of its first paragraph has no <p>. */
function renderItem(lines, depth) {
  const [first, ...rest] = renderNested(lines, depth);
  return element("li", {}, ...(first?.tagName === "P" ? first.childNodes : first ? [first] : []), ...rest);
}

function renderTable([head, , ...rows]) {
  const row = (line, tag) => element("tr", {}, ...splitCells(line).map((cell) => element(tag, {}, ...renderInline(cell, 0))));
  const body = element("tbody", {}, ...rows.map((line) => row(line, "td")));
  return element("div", { className: "scroll", tabIndex: 0 }, element("table", {}, element("thead", {}, row(head, "th")), body));
}

const splitCells = (line) =>
  line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

/** Nodes of a line's text. Marks without a counterpart stay text. */
function renderInline(text, depth) {
  const nodes = [];
  const unclosed = new Set(); // marks without a closing one further on
  let plain = "";
  let at = 0;
  const push = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  MARK.lastIndex = 0;
  for (let match = MARK.exec(text); match; match = MARK.exec(text)) {
    plain += text.slice(at, match.index);
    at = match.index;
    const span = parseSpan(text, match, unclosed, depth);
    if (span.node) push(span.node);
    else plain += span.text;
    MARK.lastIndex = at = span.end;
  }
  plain += text.slice(at);
  if (plain) nodes.push(plain);
  return nodes;
}

/** What a mark stands for: a node or text, and the index behind it. A mark found unclosed once has no
 *  closing one further on: that keeps rendering linear. */
function parseSpan(text, match, unclosed, depth) {
  const [mark, escaped, ticks, emphasis, , url] = match;
  const start = match.index + mark.length;
  const literal = { text: mark, end: start };
  if (escaped) return { text: escaped, end: start };
  if (url) return parseUrl(url, match.index);
  if (unclosed.has(mark) || depth >= MAX_DEPTH) return literal;
  if (emphasis && !opensEmphasis(text, match.index, mark)) return literal;
  const parse = ticks ? parseCode : emphasis ? parseEmphasis : parseLink;
  // Rendering the inner text uses the same regular expression; the caller sets its position again.
  const span = parse(text, match.index, mark, depth);
  if (span) return span;
  if (span === null) unclosed.add(mark);
  return literal;
}

function parseUrl(url, index) {
  const href = url.replace(URL_END, "");
  return { node: renderLink(href, [href]), end: index + href.length };
}

function parseCode(text, index, ticks) {
  const start = index + ticks.length;
  let end = text.indexOf(ticks, start);
  while (end >= 0 && text[end + ticks.length] === "`") end = text.indexOf(ticks, skipTicks(text, end));
  if (end < 0) return null;
  return { node: element("code", { textContent: text.slice(start, end).trim() }), end: end + ticks.length };
}

function skipTicks(text, at) {
  while (text[at] === "`") at += 1;
  return at;
}

function opensEmphasis(text, index, mark) {
  const inWord = mark[0] === "_" && WORD.test(text[index - 1] ?? "");
  return !inWord && /\S/.test(text[index + mark.length] ?? "");
}

function parseEmphasis(text, index, mark, depth) {
  const start = index + mark.length;
  const end = findClosing(text, start, mark);
  if (end < 0) return null;
  const children = renderInline(text.slice(start, end), depth + 1);
  return { node: element(EMPHASIS[mark], {}, ...children), end: end + mark.length };
}

function findClosing(text, start, mark) {
  for (let end = text.indexOf(mark, start + 1); end >= 0; end = text.indexOf(mark, end + mark.length)) {
    const doubled = mark.length === 1 && text[end + 1] === mark;
    if (doubled) end += 1;
    else if (/\S/.test(text[end - 1]) && !(mark[0] === "_" && WORD.test(text[end + mark.length] ?? ""))) return end;
  }
  return -1;
}

/** [text](url). An image becomes a link: the page loads nothing from other servers. */
function parseLink(text, index, bracket, depth) {
  const start = index + bracket.length;
  const close = text.indexOf("](", start);
  if (close < 0) return null;
  const target = LINK_TARGET.exec(text.slice(close + 1, close + 1 + MAX_TARGET_CHARS));
  if (!target) return undefined;
  const label = text.slice(start, close);
  const end = close + 1 + target[0].length;
  if (!SAFE_LINK.test(target[1])) return { text: label, end };
  return { node: renderLink(target[1], renderInline(label || target[1], MAX_DEPTH)), end };
}

const renderLink = (href, children) =>
  element("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
