// Puts the views of one document into the page. A view is drawn again when the parts it shows have changed.

const VIEWS = [
  ["problems-note", null, ["problems", "unlisted_problems"], damageNote],
  ["incidents", "Incidents", ["incidents"], summary],
  ["now", "Now", ["now"], nowView],
  ["mesh", "Ranks", ["ranks", "incidents"], (data) => new MeshView(data).root],
  ["evidence", "Evidence", ["incidents", "strips"], evidenceView],
  ["times", "Times", ["strips"], stripsView],
  ["timeline", "Timeline", ["timeline", "trust", "keeps_checkpoints", "incidents"], timelineView],
  ["coverage", "Coverage", ["coverage", "not_checked", "ranks"], coverageView],
  ["problems", null, ["problems", "unlisted_problems"], problemsView],
];
const AT_ONCE = ["problems-note", "incidents", "now"];
const placed = new Map(), waiting = new Set();

// `changed` are the names of parts; without it, all of them. What has changed in a long view, such as the mesh of
// a large job, is drawn after the browser has shown the others.
function render(data, changed) {
  const root = document.getElementById("report");
  document.getElementById("run").replaceChildren(h("code", {}, shown(data.run_dir, 300)), h("br"), shown(data.sentence));
  const still = data.incidents.filter((each) => each.state === "open").length;
  document.title = (data.now && still ? "(" + still + ") " : "") + "scout: " + shown(data.run_dir, 100);
  if (placed.size === 0) {
    root.replaceChildren(h("nav", { "aria-label": "sections", id: "sections" }));
    for (const [id] of VIEWS) placed.set(id, root.appendChild(document.createComment(id)));
  }
  const due = VIEWS.filter(([, , parts]) => !changed || parts.some((each) => changed.includes(each)));
  const later = changed ? due.filter(([id]) => !AT_ONCE.includes(id)) : [];
  draw(data, due.filter((each) => !later.includes(each)));
  // Once for all that wait: a tab in the background gets no frames, perhaps for hours.
  if (later.length > 0 && waiting.size === 0) requestAnimationFrame(() => setTimeout(() => drawWaiting(data)));
  for (const each of later) waiting.add(each);
}

function drawWaiting(data) {
  const views = [...waiting];
  waiting.clear();
  draw(data, views);
}

function draw(data, views) {
  for (const [id, , , view] of views) {
    const before = placed.get(id), after = view(data) || document.createComment(id);
    const state = stateIn(before);
    before.replaceWith(after);
    placed.set(id, after);
    restore(after, state);
  }
  const isThere = ([id, name]) => name !== null && placed.get(id) instanceof Element;
  document.getElementById("sections").replaceChildren(...VIEWS.filter(isThere).map(([id, name]) => link(id, name)));
}

// What a reader has opened, scrolled and focused in a view that is drawn again.
const keyed = (node) => {
  const home = node.closest("[id]");
  return home.id + "|" + [...home.querySelectorAll(node.tagName)].indexOf(node);
};

function stateIn(view) {
  if (!(view instanceof Element)) return null;
  const open = new Map(), at = new Map();
  for (const each of view.querySelectorAll("details")) open.set(keyed(each), each.open);
  for (const each of view.querySelectorAll(".scroll, pre")) {
    if (each.scrollTop || each.scrollLeft) at.set(keyed(each), [each.scrollLeft, each.scrollTop]);
  }
  const focused = view.contains(document.activeElement) ? document.activeElement : null;
  return { open, at, focus: focused && nameForFocus(focused) };
}

function restore(view, state) {
  if (state === null || !(view instanceof Element)) return;
  for (const each of view.querySelectorAll("details")) if (state.open.has(keyed(each))) each.open = state.open.get(keyed(each));
  for (const each of view.querySelectorAll(".scroll, pre")) if (state.at.has(keyed(each))) each.scrollTo(...state.at.get(keyed(each)));
  const again = state.focus && [...view.querySelectorAll("a, button, input, select, summary, [tabindex]")].find((each) => nameForFocus(each) === state.focus);
  if (again) again.focus({ preventScroll: true });
}

function nameForFocus(node) {
  return node.id || node.getAttribute("data-rank") || node.getAttribute("href") || node.getAttribute("aria-label") || keyed(node);
}

function damageNote(data) {
  const damaged = data.problems.length + data.unlisted_problems;
  return damaged > 0 && h("p", { class: "note", role: "note" }, "Some records could not be read. This page shows the rest: ", link("problems", plural(damaged, "problem")), ".");
}

const MOST_INCIDENTS = 20, asked = new Set();

function evidenceView(data) {
  if (data.incidents.length === 0) return null;
  const view = section("evidence", "Evidence");
  // Later incidents are drawn when they are asked for: a long run may have many.
  data.incidents.forEach((each, index) => {
    if (index < MOST_INCIDENTS || asked.has(each.number)) {
      view.append(incidentView(each, data.strips));
      return;
    }
    const place = h("article", { id: "incident-" + each.number, class: "incident" });
    place.append(h("button", { type: "button", onclick: () => { asked.add(each.number); place.replaceWith(incidentView(each, data.strips)); } }, "Show the evidence for incident " + each.number));
    view.append(place);
  });
  return view;
}

// The target of a link may be folded away.
function reveal() {
  const target = document.getElementById(location.hash.slice(1));
  for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  if (target) target.scrollIntoView();
}

const DATA = JSON.parse(document.getElementById("data").textContent);
render(DATA);
if (DATA.version) live(DATA);
window.addEventListener("hashchange", reveal);
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
if (location.hash) reveal();
