// The incidents: one sentence each, and below them the evidence.

function summary(data) {
  if (data.incidents.length === 0) {
    return section("incidents", "Incidents", h("p", { class: "calm" }, "No incidents are recorded."));
  }
  return section("incidents", "Incidents", h("ol", { class: "summary" }, data.incidents.map((each) =>
    h("li", { class: "is-" + each.state },
      h("p", { class: "head" }, badge(kindOf(each)), " ",
        h("span", { class: "kind" }, word(each.manifestation)), " ", stateOf(each), " ",
        h("span", { class: "when" }, "step " + each.step + ", " + day(each.time) + " " + clock(each.time) + " UTC")),
      h("p", { class: "sentence" }, shown(each.sentence, 1500)),
      h("p", { class: "where" }, h("b", {}, "Where: "), each.where.map((place) => shown(place, 400)).join("; ") || "no rank is named"),
      h("p", { class: "todo" }, h("b", {}, "What to do: "), shown(each.todo, 1500), " ", doneOf(each)),
      h("p", {}, link("incident-" + each.number, "Evidence for incident " + each.number))))));
}

function kindOf(incident) {
  if (!["rank", "machine"].includes(incident.scope)) return "group";
  return MARKS[incident.manifestation] ? incident.manifestation : "group";
}

function stateOf(incident) {
  const text = incident.recovered === null ? incident.state : "recovered by resuming from step " + incident.recovered;
  return h("span", { class: "state" }, text);
}

function doneOf(incident) {
  if (!incident.is_decided) return h("small", {}, "(recommended; no decision is recorded)");
  return h("small", {}, incident.is_carried_out ? "(decided and carried out)" : "(decided; not carried out)");
}

function incidentView(incident, strips) {
  const id = "incident-" + incident.number;
  const votes = incident.records.filter((each) => each.votes.length > 0);
  const bare = incident.records.filter((each) => each.votes.length === 0);
  const times = strips.map((strip, index) => ({ strip, index })).filter(({ strip }) =>
    incident.records.some((each) => each.is_time && each.surface === strip.surface && JSON.stringify(each.peers) === JSON.stringify(strip.peers)));
  return h("article", { id, class: "incident", "aria-labelledby": id + "-title" },
    h("h3", { id: id + "-title" }, badge(kindOf(incident)), " Incident " + incident.number + ": " + word(incident.manifestation) + " at step " + incident.step),
    h("p", {}, shown(incident.sentence)),
    h("p", { class: "facts" }, incident.launcher && shown(incident.launcher) + "; ", "scope: " + word(incident.scope) + "; " + (countOf(incident.ranks) ? rankList(incident.ranks) : "no rank") + " named; ", stateOf(incident), "; ", link("event-" + incident.number, "in the timeline"), "; ", link("incidents", "back to the summary")),
    incident.waits.length > 0 && [h("h4", {}, "Who waits for whom"), waitGraph(incident)],
    votes.length > 0 && [h("h4", {}, "Who voted what"), voteTable(votes)],
    times.length > 0 && [h("h4", {}, "Times"), times.map(({ index }) => h("p", {}, link("strip-" + index, "strip of " + nameOf(strips[index].surface) + " among " + rankList(strips[index].peers))))],
    incident.stacks.length > 0 && stacksView(incident),
    operationsView(incident),
    bare.length > 0 && h("ul", {}, bare.map((each) => h("li", {}, nameOf(each.surface) + ": " + shown(each.reason, 500)))));
}

function voteTable(records) {
  const rows = records.map((record) => () => [
    [h("b", {}, nameOf(record.surface)), record.layer && !record.surface.startsWith(record.layer) ? " of " + nameOf(record.layer) : "", record.mode ? h("small", {}, " " + nameOf(record.mode)) : "", record.shape ? h("small", {}, " [" + record.shape.join(", ") + "]") : "", record.repeats > 1 && h("small", {}, " (the same in " + record.repeats + " replays)")],
    record.step, word(record.status),
    h("ul", { class: "votes" }, record.votes.map((vote) => h("li", { class: vote.named && "outlier" }, h("code", {}, nameOf(vote.value)), " ", vote.named ? h("b", {}, "\u25b2 " + rankList(vote.ranks) + " (outlier)") : rankList(vote.ranks)))),
  ]);
  return longTable(["surface", "step", "verdict", "votes: value and ranks"], rows, "votes");
}

// What named ranks do on the left, what the others do on the right.
function stacksView(incident) {
  const waiting = new Set(ranksIn(incident.waiting));
  const named = incident.stacks.filter((each) => each.named), others = incident.stacks.filter((each) => !each.named);
  const title = others.every((each) => [...ranksIn(each.ranks)].every((rank) => waiting.has(rank))) ? "Waiting" : "Not named";
  const side = (title, stacks) => stacks.length > 0 && h("div", {}, named.length > 0 && h("h5", {}, title), stacks.map((each) =>
    h("details", { open: true }, h("summary", {}, countOf(each.ranks) ? rankList(each.ranks) : "a rank"), h("pre", { tabindex: "0" }, shown(each.text, 40000)))));
  return [h("h4", {}, "Stacks"), h("div", { class: "sides" }, side("Named", named), side(title, others))];
}

function operationsView(incident) {
  const shownOnes = incident.operations.concat(incident.records.filter((each) => each.operations.length > 0 || each.about.length > 0));
  if (shownOnes.length === 0) return null;
  return h("details", {}, h("summary", {}, "Progress and last operations"), shownOnes.map((each) =>
    h("div", {}, h("h5", {}, nameOf(each.surface)),
      h("dl", {}, each.about.map(([name, value]) => [h("dt", {}, nameOf(name)), h("dd", {}, shown(value, 800))])),
      each.operations.length > 0 && h("ol", { class: "operations" }, each.operations.map((text) => h("li", {}, h("code", {}, shown(text, 300))))))));
}

// Waiting ranks on the left, operations in the middle, missing ranks on the right.
function waitGraph(incident) {
  const waits = incident.waits.slice(0, 8), width = NARROW ? 340 : 720, high = NARROW ? 232 : 64, box = NARROW ? 220 : 190;
  const height = waits.length * high + 4;
  const names = new Set(ranksIn(incident.ranks));
  const picture = svg("svg", { viewBox: "0 0 " + width + " " + height, role: "img", class: "waits", "aria-label": "wait graph: " + incident.waits.map(waitSentence).join(" ") });
  picture.append(svg("defs", {}, svg("marker", { id: "arrow-" + incident.number, viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 0 L8 4 L0 8 z", class: "arrow-head" }))));
  const node = (x, y, kind, lines) => picture.append(svg("g", {},
    svg("rect", { x, y, width: box, height: 44, rx: kind === "operation" ? 22 : 4, class: "node node-" + kind }),
    lines.map((line, index) => svg("text", { x: x + box / 2, y: y + (lines.length === 1 ? 27 : 18 + 17 * index), class: index ? "small" : "" }, shown(line, 30)))));
  const arrow = (x1, y1, x2, y2) => picture.append(svg("line", { x1, y1, x2, y2, class: "arrow", "marker-end": "url(#arrow-" + incident.number + ")" }));
  // From left to right, or on a narrow screen from top to bottom.
  const place = (index, column) => (NARROW ? [(width - box) / 2, 4 + index * high + column * 74] : [2 + (column * (width - box - 4)) / 2, 8 + index * high]);
  const between = (index, column) => {
    const [x, y] = place(index, column), [toX, toY] = place(index, column + 1);
    if (NARROW) arrow(x + box / 2, y + 44, toX + box / 2, toY - 2);
    else arrow(x + box, y + 22, toX - 2, toY + 22);
  };
  waits.forEach((wait, index) => {
    const isNamed = (spans) => { for (const rank of ranksIn(spans)) if (names.has(rank)) return true; return false; };
    if (wait.inside.length > 0) {
      node(...place(index, 0), wait.cycle && isNamed(wait.inside) ? "named" : "waiting", [short(wait.inside), wait.missing.length || wait.cycle ? "waiting in" : "inside, not returned"]);
      between(index, 0);
    }
    node(...place(index, 1), "operation", [nameOf(wait.group), wait.number === null ? "" : "number " + wait.number].filter(Boolean));
    if (wait.missing.length > 0) {
      between(index, 1);
      node(...place(index, 2), isNamed(wait.missing) ? "named" : "late", [short(wait.missing), isNamed(wait.missing) ? "named: not entered" : "not entered"]);
    } else if (wait.cycle) {
      const next = waits[(index + 1) % waits.length];
      between(index, 1);
      node(...place(index, 2), "late", [short(next.inside), "in another operation"]);
    }
  });
  const more = incident.waits.length - waits.length;
  return h("figure", {}, h("div", { class: "scroll" }, picture), h("figcaption", {}, incident.waits.slice(0, 8).map(waitSentence).join(" "), more > 0 ? " " + plural(more, "further operation") + " not drawn." : ""));
}

function short(spans) {
  const count = countOf(spans);
  return count > 4 ? plural(count, "rank") : rankList(spans);
}

function waitSentence(wait) {
  const inside = capital(rankList(wait.inside)), group = nameOf(wait.group);
  if (wait.cycle) return inside + " in " + group + " of the cycle.";
  if (wait.missing.length === 0) return inside + " entered operation " + wait.number + " of " + group + ", and none is missing.";
  return inside + (countOf(wait.inside) === 1 ? " waits" : " wait") + " in operation " + wait.number + " of " + group + " for " + rankList(wait.missing) + ".";
}
