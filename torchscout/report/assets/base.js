"use strict";
// What all views share. Texts from records enter the page through text nodes only.

const SVG = "http://www.w3.org/2000/svg";
const NARROW = window.matchMedia("(max-width: 40rem)").matches;
const NAME_LENGTH = 90, TEXT_LENGTH = 4000;

// Control and direction characters are shown as escapes: they would change how a line reads.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

function shown(value, most = TEXT_LENGTH) {
  const text = String(value);
  const cut = text.length > most ? text.slice(0, most) + "\u2026 (" + text.length + " characters)" : text;
  return cut.replace(HIDDEN, (each) => "\\u" + each.charCodeAt(0).toString(16).padStart(4, "0"));
}

function nameOf(value) {
  return shown(value, NAME_LENGTH);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(shown(child)));
  }
  return node;
}

function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Ranks are pairs of first and last.
function countOf(spans) {
  return spans.reduce((sum, [first, last]) => sum + last - first + 1, 0);
}

function* ranksIn(spans) {
  for (const [first, last] of spans) for (let rank = first; rank <= last; rank++) yield rank;
}

function rankList(spans, most = 12) {
  const count = countOf(spans);
  const parts = spans.slice(0, most).map(([a, b]) => (a === b ? a : b === a + 1 ? a + ", " + b : a + "\u2013" + b));
  const more = spans.length > most ? " \u2026 (" + number(count) + " ranks)" : "";
  return (count === 1 ? "rank " : "ranks ") + parts.join(", ") + more;
}

function capital(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

function number(value) {
  return Number(value).toLocaleString("en-US");
}

function plural(count, word) {
  return number(count) + " " + word + (count === 1 ? "" : "s");
}

function clock(seconds) {
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? "?" : date.toISOString().slice(11, 19);
}

function day(seconds) {
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? "?" : date.toISOString().slice(0, 10);
}

function link(id, ...children) {
  return h("a", { href: "#" + id }, ...children);
}

function section(id, title, ...children) {
  return h("section", { id, "aria-labelledby": id + "-title" }, h("h2", { id: id + "-title" }, title), ...children);
}

function table(heads, rows, label) {
  return h(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, heads.map((each) => h("th", { scope: "col" }, each)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, index) => h("td", { "data-head": heads[index], class: cell === "" && "blank" }, cell)))))),
  );
}

// A table that shows its first rows, and the rest on demand; then also when it is drawn again.
const expanded = new Set();

function longTable(heads, rows, label, first = 40) {
  if (rows.length <= first || expanded.has(label)) return table(heads, rows.map((row) => row()), label);
  const place = h("div", {}, table(heads, rows.slice(0, first).map((row) => row()), label));
  const more = h("button", { type: "button", onclick: () => {
    expanded.add(label);
    place.replaceChildren(table(heads, rows.map((row) => row()), label));
  } }, "Show all " + number(rows.length) + " rows");
  place.append(more);
  return place;
}

const WORDS = {
  sdc: "wrong numbers", straggler: "slow", hang: "hang", crash: "crash", not_checked: "not checked",
  rank: "rank", machine: "machine", peer_group: "peer group", process_group: "process group", job: "job",
};

function word(value) {
  return WORDS[value] || nameOf(value);
}

// Letter and style of a rank. Letters carry the meaning, colours only repeat it.
const MARKS = {
  sdc: { letter: "C", text: "named: wrong numbers (corrupt)" },
  hang: { letter: "H", text: "named: holds up the job (hang)" },
  crash: { letter: "X", text: "named: its process has ended (crash)" },
  straggler: { letter: "S", text: "named: slow" },
  not_checked: { letter: "N", text: "named: no longer checked" },
  group: { letter: "G", text: "member of a named group; no rank is named" },
  waits: { letter: "w", text: "waits for a named rank" },
};
const ORDER = ["sdc", "crash", "hang", "straggler", "not_checked", "group", "waits"];

function badge(mark) {
  return h("span", { class: "badge mark-" + mark, title: MARKS[mark].text }, MARKS[mark].letter);
}

// Rank -> mark, of one incident or of all.
function marksOf(incidents) {
  const marks = new Map();
  const set = (rank, mark) => {
    const known = marks.get(rank);
    if (known === undefined || ORDER.indexOf(mark) < ORDER.indexOf(known)) marks.set(rank, mark);
  };
  for (const incident of incidents) {
    const named = ["rank", "machine"].includes(incident.scope) ? incident.manifestation : "group";
    for (const rank of ranksIn(incident.ranks)) set(rank, MARKS[named] ? named : "group");
    for (const rank of ranksIn(incident.waiting)) set(rank, "waits");
  }
  return marks;
}
