// Markdown as models write it, in elements and text nodes: HTML in it is text, links lead to the web alone, and no image
// is loaded.

import { copyButton, make } from "./elements.js";

const LONGEST = 20000; // characters of a block that are read as Markdown
const DEEPEST = 6; // lists and quotes in each other

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DASHES = /^ *\|?(?: *:?-+:? *\|)* *:?-+:? *\|? *$/;
const INLINE = new RegExp([
  /\\(?<escaped>[!-/:-@[-`{-~])/,
  /(?<ticks>`+)(?<code>[^`](?:.*?[^`])?)\k<ticks>(?!`)/,
  /!?\[(?<label>[^[\]]*)\]\((?<target>[^()\s]*)(?: "[^"]*")?\)/,
  /(?<url>https?:\/\/[^\s<>"'`()[\]]*[^\s<>"'`()[\].,;:!?])/,
  /\*\*(?=\S)(?<strong>.+?)(?<=\S)\*\*/,
  /\*(?=\S)(?<starred>[^*]+?)(?<=\S)\*/,
  /(?<!\w)_(?=\S)(?<underlined>[^_]+?)(?<=\S)_(?!\w)/,
  /~~(?=\S)(?<struck>.+?)(?<=\S)~~/,
].map((one) => one.source).join("|"), "gs");

// Puts `text` into `parent`. Called again with more of it, it leaves finished blocks as they are.
export function render(parent, text) {
  const blocks = split(text), shown = parent.sources ?? [];
  parent.sources = blocks.map(({ source }) => source);
  blocks.forEach((block, place) => {
    if (shown[place] === block.source) return;
    const element = build(block, 0), old = parent.children[place];
    if (old) old.replaceWith(element); else parent.append(element);
  });
  while (parent.children.length > blocks.length) parent.lastChild.remove();
}

function split(text) {
  const lines = text.split("\n"), blocks = [];
  for (let line = 0; line < lines.length;) {
    const { kind, end } = measure(lines, line);
    if (kind) blocks.push({ kind, source: lines.slice(line, end).join("\n") });
    line = end;
  }
  return blocks;
}

// The block that begins at `start`: its kind, and the line after it.
function measure(lines, start) {
  const line = lines[start], until = (isOver) => {
    let end = start + 1;
    while (end < lines.length && !isOver(lines[end], end)) end++;
    return end;
  };
  if (!line.trim()) return { end: start + 1 };
  const fence = FENCE.exec(line)?.[1];
  if (fence) return { kind: "code", end: until((_, next) => next > start + 1 && closes(lines[next - 1], fence)) };
  if (HEADING.test(line)) return { kind: "heading", end: start + 1 };
  if (RULE.test(line)) return { kind: "rule", end: start + 1 };
  if (QUOTE.test(line)) return { kind: "quote", end: until((next) => !QUOTE.test(next)) };
  if (isTable(lines, start)) return { kind: "table", end: until((next) => !next.includes("|")) };
  if (ITEM.test(line)) return { kind: "list", end: until((next, place) => endsList(lines, place)) };
  return { kind: "paragraph", end: until((next, place) => !next.trim() || begins(lines, place)) };
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && [...text].every((one) => one === fence[0]);
}

function isTable(lines, start) {
  return lines[start].includes("|") && (lines[start + 1] ?? "").includes("|") && DASHES.test(lines[start + 1]);
}

function begins(lines, place) {
  const line = lines[place];
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(line)) || isTable(lines, place);
}

function endsList(lines, place) {
  const line = lines[place], isIndented = /^ {2}/.test(line);
  if (!line.trim()) {
    const next = lines[place + 1] ?? "";
    return !(next.trim() && (ITEM.test(next) || /^ {2}/.test(next)));
  }
  return !isIndented && (RULE.test(line) || (!ITEM.test(line) && (!lines[place - 1].trim() || begins(lines, place))));
}

function build({ kind, source }, depth) {
  if (source.length > LONGEST && kind !== "code") return make("p", {}, source);
  if (depth > DEEPEST) return make("p", {}, source);
  return BUILDERS[kind](source, depth);
}

const BUILDERS = {
  paragraph: (source) => make("p", {}, ...inline(source)),
  heading: (source) => {
    const [, marks, text] = HEADING.exec(source);
    return make(`h${Math.min(marks.length + 2, 6)}`, {}, ...inline(text)); // the page has h1 and h2
  },
  rule: () => make("hr"),
  quote: (source, depth) => make("blockquote", {}, ...within(source.replace(/^ {0,3}> ?/gm, ""), depth)),
  code: buildCode,
  table: buildTable,
  list: buildList,
};

function within(source, depth) { return split(source).map((block) => build(block, depth + 1)); }

function buildCode(source) {
  const [first, ...lines] = source.split("\n"), [, fence, language] = FENCE.exec(first);
  if (lines.length && closes(lines.at(-1), fence)) lines.pop();
  const text = lines.join("\n");
  const bar = make("div", { className: "codebar" }, make("span", {}, language || "text"), copyButton(() => text));
  return make("div", { className: "code" }, bar, make("pre", { tabIndex: 0 }, make("code", {}, text)));
}

function buildTable(source) {
  const [head, , ...rows] = source.split("\n").map(cellsOf);
  const width = Math.max(head.length, ...rows.map((cells) => cells.length)), columns = Array.from({ length: width }, (_, place) => place);
  const row = (cells, tag) => make("tr", {}, ...columns.map((place) => make(tag, {}, ...inline(cells[place] ?? ""))));
  const body = make("tbody", {}, ...rows.map((cells) => row(cells, "td")));
  return make("div", { className: "wide", tabIndex: 0 }, make("table", {}, make("thead", {}, row(head, "th")), body));
}

function cellsOf(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function buildList(source, depth) {
  const lines = source.split("\n"), [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) items.push([line.slice(found[0].length)]);
    else items.at(-1).push(line.replace(new RegExp(`^ {0,${indent.length + mark.length + 1}}`), ""));
  }
  const isNumbered = /\d/.test(mark);
  return make(isNumbered ? "ol" : "ul", isNumbered ? { start: parseInt(mark, 10) } : {}, ...items.map((item) => {
    const [first, ...rest] = within(item.join("\n"), depth);
    const text = first?.tagName === "P" ? [...first.childNodes] : first ? [first] : [];
    return make("li", {}, ...text, ...rest);
  }));
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index), buildInline(match[0], match.groups));
    end = match.index + match[0].length;
  }
  return [...nodes, text.slice(end)].filter((node) => node !== "");
}

function buildInline(source, found) {
  if (found.escaped) return found.escaped;
  if (found.code) return make("code", {}, found.code.trim());
  if (found.url) return link(found.url, [found.url]);
  if (found.target !== undefined) {
    return /^(https?:\/\/|mailto:)/i.test(found.target) ? link(found.target, inline(found.label || found.target)) : source;
  }
  if (found.strong) return make("strong", {}, ...inline(found.strong));
  if (found.struck) return make("s", {}, ...inline(found.struck));
  return make("em", {}, ...inline(found.starred ?? found.underlined));
}

function link(href, children) {
  return make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}
