// Drawings over time: steps, checks, trust and incidents; and the strips of times.

const CHART = { width: NARROW ? 400 : 960, left: NARROW ? 58 : 72, right: 20, top: 16 };

function scale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

function ticks(low, high, count) {
  const rough = (high - low || 1) / count, base = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((each) => each * base).find((each) => each >= rough) || rough;
  const found = [];
  for (let at = Math.ceil(low / size) * size; at <= high + size / 1e6 && found.length < 20; at += size) found.push(at);
  return found;
}

const EVENT_LETTERS = { start: "\u25b6", incident: "\u25c6", end: "\u2713", decision: "\u25a0" };
const EVENT_WORDS = { start: "start", incident: "incident", end: "resolved", decision: "decision" };

function timelineChart(data) {
  const times = data.trust.map((each) => each[0]).concat(data.timeline.map((each) => each.time));
  if (times.length === 0) return null;
  const height = 280, bottom = height - 28, lanes = 64;
  const low = times.reduce((a, b) => Math.min(a, b)), high = times.reduce((a, b) => Math.max(a, b));
  const steps = data.trust.map((each) => each[1]).concat(data.timeline.map((each) => each.step));
  const top = steps.reduce((a, b) => Math.max(a, b), 1);
  const x = scale(low, high, CHART.left, CHART.width - CHART.right), y = scale(0, top, bottom - lanes, CHART.top);
  const picture = svg("svg", { viewBox: "0 0 " + CHART.width + " " + height, role: "img", "aria-label": "steps, checks, checkpoints that can be trusted, and incidents over time; the table below has the same events" });
  for (const step of ticks(0, top, 5)) {
    picture.append(svg("line", { x1: CHART.left, x2: CHART.width - CHART.right, y1: y(step), y2: y(step), class: "rule" }),
      svg("text", { x: CHART.left - 6, y: y(step) + 4, class: "axis end" }, number(Math.round(step))));
  }
  const parts = NARROW ? 2 : 4;
  for (const at of [...Array(parts + 1).keys()].map((part) => low + ((high - low) * part) / parts)) {
    picture.append(svg("text", { x: x(at), y: height - 8, class: "axis " + (at === low ? "start" : at === high ? "end" : "") }, clock(at)));
  }
  const poisoned = data.trust.filter((each) => each[5] !== null);
  for (const each of poisoned) picture.append(svg("line", { x1: x(each[0]), x2: x(each[0]), y1: CHART.top, y2: bottom - lanes, class: "poison" }));
  for (const [name, column] of [["latest", 2], ["candidate", 3], ["verified", 4]]) {
    const points = data.trust.filter((each) => each[column] !== null);
    if (points.length === 0) continue;
    // A step function: a generation keeps its role until the next check.
    let path = "", before = null;
    for (const each of points) {
      const here = x(each[0]).toFixed(1), level = y(each[column]).toFixed(1);
      path += before === null ? "M" + here + " " + level : "H" + here + "V" + level;
      before = level;
    }
    picture.append(svg("path", { d: path, class: "line line-" + name }));
  }
  const checks = bottom - lanes + 20;
  picture.append(svg("text", { x: CHART.left - 12, y: checks + 4, class: "axis end" }, "checks"));
  for (const each of data.trust) picture.append(svg("line", { x1: x(each[0]), x2: x(each[0]), y1: checks - 5, y2: checks + 5, class: "tick" }));
  picture.append(svg("text", { x: CHART.left - 12, y: bottom - 12, class: "axis end" }, "events"));
  let last = -Infinity, row = 0;
  for (const event of data.timeline) {
    const at = x(event.time);
    row = at - last < 16 ? (row + 1) % 3 : 0;
    last = at;
    if (event.kind === "incident") picture.append(svg("line", { x1: at, x2: at, y1: CHART.top, y2: bottom, class: "when-incident" }));
    picture.append(svg("text", { x: at, y: bottom - 24 + 13 * row, class: "event event-" + event.kind },
      event.kind === "incident" ? EVENT_LETTERS.incident + event.incident : EVENT_LETTERS[event.kind] || "?"));
  }
  const keys = data.keeps_checkpoints ? [["line line-latest", "latest"], ["line line-candidate", "candidate"], ["line line-verified", "verified"]] : [["line line-verified", "certified"]];
  return h("figure", {}, h("div", { class: "scroll" }, picture),
    h("figcaption", {}, "Step over time (" + day(low) + ", UTC). ",
      data.trust.length ? keys.map(([kind, name]) => [svg("svg", { viewBox: "0 0 28 8", class: "key" }, svg("path", { d: "M0 4H28", class: kind })), " " + name + "; "]) : "The records have no checks, so that the checkpoints cannot be drawn. ",
      Object.keys(EVENT_LETTERS).map((kind) => EVENT_LETTERS[kind] + " " + EVENT_WORDS[kind] + "; "),
      poisoned.length ? "shaded: corruption was found and not yet recovered from." : ""));
}

function stripsView(data) {
  if (data.strips.length === 0) {
    return section("times", "Times", h("p", {}, "No times are recorded. Rounds without a slow rank are counted, and not kept, unless ReplayConfig(records=\"all\") is set."));
  }
  const place = h("div", {});
  const slow = data.strips.filter((each) => each.slow.length > 0).length, first = expanded.has("strips") ? data.strips.length : Math.max(3, Math.min(6, slow));
  data.strips.slice(0, first).forEach((each, index) => place.append(stripView(each, index)));
  if (data.strips.length > first) {
    // Anchors of strips that are not drawn yet must exist.
    const more = h("button", { type: "button", onclick: () => {
      more.remove();
      expanded.add("strips");
      data.strips.slice(first).forEach((each, index) => document.getElementById("strip-" + (first + index)).replaceWith(stripView(each, first + index)));
    } }, "Show " + (data.strips.length - first) + " more");
    place.append(more, data.strips.slice(first).map((_, index) => h("span", { id: "strip-" + (first + index) }))[0]);
    data.strips.slice(first + 1).forEach((_, index) => place.append(h("span", { id: "strip-" + (first + 1 + index) })));
  }
  return section("times", "Times", h("p", { class: "hint" }, "Each dot is a rank in one round. The line is the median, the dashed line the median plus five robust scales. Rounds without a slow rank are counted, and not kept, unless ReplayConfig(records=\"all\") is set."), place);
}

function stripView(strip, index) {
  const height = 150, bottom = height - 26, rounds = strip.rounds;
  const values = rounds.flatMap((each) => [each.range[3], each.range[0], each.limit || each.median]);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), 0);
  // Logarithmic if a slow rank is many times slower, so that the others stay apart.
  const isLog = low > 0 && high / low > 8, to = (value) => (isLog ? Math.log10(Math.max(value, low)) : value);
  const y = scale(to(isLog ? low : 0), to(high * 1.05), bottom, CHART.top);
  const wide = (CHART.width - CHART.left - CHART.right) / Math.max(rounds.length, 1);
  const picture = svg("svg", { viewBox: "0 0 " + CHART.width + " " + height, role: "img", "aria-label": "times of " + nameOf(strip.surface) + " among " + plural(strip.count, "rank") + (strip.slow.length ? "; outliers: " + rankList(strip.slow) : "") });
  const levels = isLog ? [low, Math.sqrt(low * high), high] : ticks(0, high, 3);
  for (const level of levels) {
    picture.append(svg("line", { x1: CHART.left, x2: CHART.width - CHART.right, y1: y(to(level)), y2: y(to(level)), class: "rule" }),
      svg("text", { x: CHART.left - 6, y: y(to(level)) + 4, class: "axis end" }, number(Number(level.toPrecision(2))) + " ms"));
  }
  const every = Math.ceil(rounds.length / (NARROW ? 5 : 16));
  let lastName = -Infinity; // names that would overlap are left out; the caption has all of them
  rounds.forEach((round, position) => {
    const left = CHART.left + position * wide, middle = left + wide / 2, half = Math.min(wide * 0.4, 40);
    const level = (value, kind) => svg("line", { x1: middle - half, x2: middle + half, y1: y(to(value)), y2: y(to(value)), class: kind });
    picture.append(svg("rect", { x: middle - half, width: 2 * half, y: y(to(round.range[2])), height: Math.max(1, y(to(round.range[1])) - y(to(round.range[2]))), class: "quartiles" }), level(round.median, "median"));
    if (round.limit !== null) picture.append(level(round.limit, "limit"));
    round.dots.forEach(([rank, time, isOut], place) => {
      const at = middle + (round.dots.length > 1 ? (place / (round.dots.length - 1) - 0.5) * half * 1.6 : 0);
      const title = svg("title", {}, "rank " + rank + ": " + time.toPrecision(4) + " ms, step " + round.step + (round.layer ? ", " + nameOf(round.layer) : ""));
      if (isOut) picture.append(svg("path", { d: "M" + at + " " + (y(to(time)) - 6) + "l6 11h-12z", class: "dot-out" }, title));
      if (isOut && at - lastName > 10 * String(rank).length + 4) picture.append(svg("text", { x: lastName = at, y: y(to(time)) - 8, class: "small out-name" }, rank));
      if (!isOut) picture.append(svg("circle", { cx: at, cy: y(to(time)), r: 3, class: "dot" }, title));
    });
    if (position % every === 0) picture.append(svg("text", { x: middle, y: height - 8, class: "axis" }, "step " + round.step));
  });
  return h("figure", { id: "strip-" + index }, h("figcaption", {}, h("b", {}, nameOf(strip.surface)), " among " + rankList(strip.peers) + (strip.slow.length ? "; outliers in a round: " + rankList(strip.slow) : "; no outliers") + (isLog ? " (logarithmic)" : "")), h("div", { class: "scroll" }, picture));
}
