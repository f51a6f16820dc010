// Tables: events, coverage, what was not checked, and what could not be read.

function timelineView(data) {
  const rows = data.timeline.map((event) => () => [
    event.kind === "incident" ? h("span", { id: "event-" + event.incident }, clock(event.time)) : clock(event.time),
    event.step, (EVENT_LETTERS[event.kind] || "?") + " " + (EVENT_WORDS[event.kind] || nameOf(event.kind)),
    [shown(event.text, 600), event.incident === null ? "" : [" ", link("incident-" + event.incident, "incident " + event.incident)]],
  ]);
  const last = data.trust[data.trust.length - 1], role = (value) => (value === null ? "none" : "step " + value);
  return section("timeline", "Timeline", timelineChart(data),
    last ? h("p", {}, "After the check of step " + last[1] + ": " + (data.keeps_checkpoints ? "latest " + role(last[2]) + ", candidate " + role(last[3]) + ", verified " : "certified ") + role(last[4]) + (last[5] === null ? "." : "; corruption was found at step " + last[5] + ", and nothing since is trusted.")) : null,
    rows.length ? longTable(["UTC", "step", "what", "in words"], rows, "events", Math.max(40, data.incidents.length)) : h("p", {}, "No events are recorded."));
}

function coverageView(data) {
  const ranks = data.ranks, rows = data.coverage.map((row) => () => [
    [h("b", {}, nameOf(row.name)), row.surface_count > 1 && h("details", {}, h("summary", {}, plural(row.surface_count, "surface")), h("ul", {}, row.surfaces.map((each) => h("li", {}, nameOf(each)))), row.surface_count > row.surfaces.length && h("p", {}, "and more"))],
    word(row.manifestation), row.modes.map(nameOf).join(", "),
    row.shapes.map((shape) => "[" + shape.join(", ") + "]").join(" "),
    row.groups === 1 ? rankList(row.group) : [plural(row.groups, "group"), h("small", {}, " such as " + rankList(row.group, 4))],
    number(row.count), row.findings ? h("b", {}, number(row.findings)) : "0",
    row.first === row.last ? row.first : row.first + "\u2013" + row.last,
  ]);
  return section("coverage", "Coverage",
    h("p", {}, ranks.observed === ranks.size ? "All ranks are observed for hangs." : "Observed for hangs: " + number(ranks.observed) + " of " + plural(ranks.size, "rank") + "."),
    rows.length ? longTable(["what was compared", "for", "modes", "recorded shapes", "among", "comparisons", "disagreed", "steps"], rows, "coverage", 24)
      : h("p", {}, "No comparisons are recorded: nothing was checked for wrong numbers or slow ranks, or the job ended before it wrote them."),
    h("h3", { id: "not-checked" }, "Not checked"),
    data.not_checked.length ? longTable(["reason", "what", "ranks", "steps"], data.not_checked.map((row) => () => [
      shown(row.reason, 600), row.surfaces.map(nameOf).join(", ") + (row.surface_count > row.surfaces.length ? " and " + (row.surface_count - row.surfaces.length) + " more" : ""),
      rankList(row.ranks, 6), row.first === null ? "" : row.first === row.last ? row.first : row.first + "\u2013" + row.last,
    ]), "not checked", 24) : h("p", {}, "Nothing that was due was left out, as far as the records show."));
}

function problemsView(data) {
  const count = data.problems.length + data.unlisted_problems;
  if (count === 0) return null;
  return section("problems", "What could not be read",
    h("p", {}, plural(count, "line") + " or files are damaged, unfinished or foreign. Everything else is shown; what these lines said is missing."),
    longTable(["where and why"], data.problems.map((each) => () => [shown(each, 400)]), "problems", 10),
    data.unlisted_problems > 0 && h("p", {}, "and " + number(data.unlisted_problems) + " more"));
}
