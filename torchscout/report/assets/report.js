// Puts the views of one document into the page.

function render(data) {
  const root = document.getElementById("report");
  document.getElementById("run").replaceChildren(h("code", {}, shown(data.run_dir, 300)), h("br"), shown(data.sentence));
  document.title = "scout report: " + shown(data.run_dir, 100);
  const damaged = data.problems.length + data.unlisted_problems;
  const nav = h("nav", { "aria-label": "sections" }, [["incidents", "Incidents"], ["mesh", "Ranks"], ["evidence", "Evidence"], ["times", "Times"], ["timeline", "Timeline"], ["coverage", "Coverage"]]
    .filter(([id]) => id !== "evidence" || data.incidents.length > 0).map(([id, name]) => link(id, name)));
  root.replaceChildren(nav);
  if (damaged > 0) root.append(h("p", { class: "note", role: "note" }, "Some records could not be read. This page shows the rest: ", link("problems", plural(damaged, "problem")), "."));
  root.append(summary(data), new MeshView(data).root);
  if (data.incidents.length > 0) root.append(evidenceView(data));
  root.append(stripsView(data), timelineView(data), coverageView(data));
  const problems = problemsView(data);
  if (problems !== null) root.append(problems);
}

const MOST_INCIDENTS = 20;

function evidenceView(data) {
  const view = section("evidence", "Evidence");
  // Later incidents are drawn when they are asked for: a long run may have many.
  data.incidents.forEach((each, index) => {
    if (index < MOST_INCIDENTS) {
      view.append(incidentView(each, data.strips));
      return;
    }
    const place = h("article", { id: "incident-" + each.id, class: "incident" });
    place.append(h("button", { type: "button", onclick: () => place.replaceWith(incidentView(each, data.strips)) }, "Show the evidence for incident " + each.id));
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

render(JSON.parse(document.getElementById("data").textContent));
window.addEventListener("hashchange", reveal);
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
if (location.hash) reveal();
