// The mesh: every rank as a cell, or, in a large job, machines or replicas that open into ranks.

const MOST_CELLS = 512;
// What the reader has chosen, for a view that is drawn again.
const chosen = { incident: "", by: "host", group: null, rank: null };

class MeshView {
  constructor(data) {
    this.ranks = data.ranks;
    this.incidents = data.incidents;
    this.axes = Object.keys(data.ranks.axes);
    this.isLarge = data.ranks.size > MOST_CELLS;
    if (!this.axes.includes(chosen.by)) chosen.by = "host";
    this.place = h("div", { class: "mesh" });
    this.drilled = h("div", {});
    this.detail = h("div", { class: "detail", "aria-live": "polite" });
    if (this.ranks.size === 0) {
      this.root = section("mesh", "Ranks", h("p", {}, "No ranks are recorded."));
      return;
    }
    this.root = section("mesh", "Ranks", this.controls(), this.legend(), this.place, this.drilled, this.detail);
    const { group, rank } = chosen;
    this.draw();
    const tile = [...this.place.querySelectorAll(".tile")].find((each) => each.title === group);
    if (tile) tile.click();
    if (rank !== null) this.show(rank);
  }

  controls() {
    const options = [h("option", { value: "" }, "all incidents")].concat(
      this.incidents.map((each) => h("option", { value: each.number }, "incident " + each.number + ": " + word(each.manifestation))));
    const pick = h("select", { id: "mesh-mark", onchange: () => { chosen.incident = pick.value; this.draw(); } }, options);
    pick.value = chosen.incident;
    const parts = [h("label", {}, "Mark ", pick)];
    if (this.isLarge) {
      const by = h("select", { id: "mesh-by", onchange: () => { chosen.by = by.value; this.draw(); } },
        ["host", ...this.axes].map((each) => h("option", { value: each }, each === "host" ? "machine" : each)));
      by.value = chosen.by;
      parts.push(h("label", {}, "Group by ", by));
    }
    const find = h("input", { type: "number", min: 0, max: this.ranks.size - 1, id: "find-rank", size: 7 });
    parts.push(h("form", { onsubmit: (event) => { event.preventDefault(); this.show(Number(find.value)); } },
      h("label", {}, "Rank ", find), h("button", { type: "submit" }, "Show")));
    return h("div", { class: "controls" }, parts);
  }

  legend() {
    const used = new Set(marksOf(this.incidents).values());
    const items = ORDER.filter((each) => used.has(each)).map((each) => h("li", {}, badge(each), " ", MARKS[each].text));
    items.push(h("li", {}, h("span", { class: "badge" }, "\u00b7"), " nothing found"));
    if (!this.isLarge) items.push(h("li", {}, h("span", { class: "outline" }), " thick lines are the borders of machines"));
    return h("ul", { class: "legend" }, items);
  }

  draw() {
    this.marks = marksOf(this.incidents.filter((each) => !chosen.incident || String(each.number) === chosen.incident));
    chosen.group = chosen.rank = null;
    this.drilled.replaceChildren();
    this.detail.replaceChildren();
    if (this.isLarge) {
      this.place.replaceChildren(this.groups());
    } else {
      this.place.replaceChildren(this.grid([...Array(this.ranks.size).keys()]));
    }
  }

  hostOf(rank) {
    const index = this.ranks.host[rank];
    return index === null || index === undefined ? "unknown machine" : this.ranks.hosts[index];
  }

  keyOf(rank) {
    const column = chosen.by === "host" ? this.ranks.host : this.ranks.axes[chosen.by];
    return column[rank];
  }

  groups() {
    const found = new Map();
    for (let rank = 0; rank < this.ranks.size; rank++) {
      const key = this.keyOf(rank);
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(rank);
    }
    const tiles = [...found.entries()].map(([key, ranks]) => {
      const name = chosen.by === "host" ? (key === null ? "unknown machine" : this.ranks.hosts[key]) : chosen.by + " " + (key === null ? "unknown" : key);
      const counts = new Map();
      for (const rank of ranks) {
        const mark = this.marks.get(rank);
        if (mark) counts.set(mark, (counts.get(mark) || 0) + 1);
      }
      return { name, ranks, counts, worst: ORDER.find((each) => counts.has(each)) };
    });
    // Groups with a named rank first; the others keep their order.
    const weight = (tile) => (tile.worst && tile.worst !== "waits" ? ORDER.indexOf(tile.worst) : ORDER.length);
    const ordered = tiles.map((tile, index) => ({ tile, index }))
      .sort((a, b) => weight(a.tile) - weight(b.tile) || a.index - b.index).map(({ tile }) => tile);
    const list = h("div", { class: "tiles", role: "group", "aria-label": "groups of ranks" });
    for (const tile of ordered) {
      const marks = [...tile.counts].map(([mark, count]) => h("span", { class: "badge mark-" + mark }, MARKS[mark].letter + " " + count));
      const says = [...tile.counts].map(([mark, count]) => count + " " + MARKS[mark].text).join(", ") || "nothing found";
      list.append(h("button", {
        type: "button", class: "tile" + (tile.worst ? " has-" + tile.worst : ""), "aria-expanded": "false",
        title: shown(tile.name, 500), "aria-label": nameOf(tile.name) + ", " + plural(tile.ranks.length, "rank") + ": " + says,
        onclick: (event) => this.drill(tile, event.currentTarget),
      }, h("span", { class: "tile-name" }, nameOf(tile.name)), h("span", { class: "tile-count" }, plural(tile.ranks.length, "rank")), marks));
    }
    roving(list, "button");
    return h("div", { class: "scroll tall" }, list);
  }

  drill(tile, button) {
    for (const each of this.place.querySelectorAll("[aria-expanded=true]")) each.setAttribute("aria-expanded", "false");
    button.setAttribute("aria-expanded", "true");
    chosen.group = button.title;
    const close = h("button", { type: "button", onclick: () => { chosen.group = null; this.drilled.replaceChildren(); button.setAttribute("aria-expanded", "false"); button.focus(); } }, "Close");
    this.drilled.replaceChildren(h("div", { class: "drilled" }, h("h3", {}, nameOf(tile.name), " ", close), this.grid(tile.ranks)));
    if (this.root.isConnected) this.drilled.firstChild.scrollIntoView({ block: "nearest" });
  }

  // Rows are replicas and columns the other coordinates; without coordinates, rows are machines.
  grid(ranks) {
    const hasAxes = this.axes.length > 0 && ranks.every((rank) => this.axes.every((axis) => this.ranks.axes[axis][rank] !== null));
    const rowAxis = this.axes.includes("replica") ? "replica" : this.axes[0];
    const others = this.axes.filter((axis) => axis !== rowAxis);
    const rowOf = (rank) => (hasAxes ? this.ranks.axes[rowAxis][rank] : this.ranks.host[rank]);
    const columnOf = (rank) => (hasAxes ? others.map((axis) => this.ranks.axes[axis][rank]).join(",") : null);
    const rows = new Map(), columns = new Map();
    for (const rank of ranks) {
      const row = rowOf(rank);
      if (!rows.has(row)) rows.set(row, new Map());
      const cells = rows.get(row);
      // Coordinates need not be unique: expert parallelism may share them.
      const base = hasAxes ? columnOf(rank) : String(cells.size);
      let column = base;
      for (let copy = 2; cells.has(column); copy++) column = base + " #" + copy;
      cells.set(column, rank);
      if (!columns.has(column)) columns.set(column, columns.size);
    }
    const names = [...columns.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const ordered = [...rows.keys()].sort((a, b) => Number(a) - Number(b));
    const at = (row, column) => { const cells = rows.get(ordered[row]); return cells && cells.get(names[column]); };
    const edge = (rank, other) => other === undefined || this.ranks.host[rank] !== this.ranks.host[other];
    const body = ordered.map((row, r) => h("tr", {},
      h("th", { scope: "row" }, hasAxes ? rowAxis + " " + row : nameOf(this.hostOf(rows.get(row).values().next().value))),
      names.map((_, c) => {
        const rank = at(r, c);
        if (rank === undefined) return h("td", { class: "empty" });
        const edges = (edge(rank, at(r - 1, c)) ? " top" : "") + (edge(rank, at(r + 1, c)) ? " bottom" : "") +
          (edge(rank, at(r, c - 1)) ? " left" : "") + (edge(rank, at(r, c + 1)) ? " right" : "");
        return h("td", { class: "place" + edges }, this.cell(rank));
      })));
    const head = hasAxes && others.length > 0
      ? h("thead", {}, h("tr", {}, h("th", { class: "axes" }, others.join(", ")), names.map((each) => h("th", { scope: "col" }, each)))) : null;
    const made = h("table", { class: "grid" }, head, h("tbody", {}, body));
    roving(made, "button");
    return h("div", { class: "scroll" }, made);
  }

  cell(rank) {
    const mark = this.marks.get(rank);
    const says = "rank " + rank + " on " + nameOf(this.hostOf(rank)) + (mark ? ", " + MARKS[mark].text : "");
    return h("button", { type: "button", class: "cell" + (mark ? " mark-" + mark : ""), "data-rank": rank, "aria-label": says, title: says,
      onclick: () => this.show(rank) }, h("span", { class: "letter" }, mark ? MARKS[mark].letter : "\u00b7"), h("span", { class: "id" }, rank));
  }

  show(rank) {
    if (!(rank >= 0 && rank < this.ranks.size)) {
      this.detail.replaceChildren(h("p", {}, "There is no rank " + rank + "; ranks are 0 to " + (this.ranks.size - 1) + "."));
      return;
    }
    chosen.rank = rank;
    const end = this.ranks.end[rank], device = this.ranks.devices[this.ranks.device[rank]];
    const mine = (spans) => spans.some(([first, last]) => first <= rank && rank <= last);
    const about = this.incidents.filter((each) => mine(each.ranks) || mine(each.waiting));
    const rows = [
      ["machine", nameOf(this.hostOf(rank))], ["device", device ? nameOf(device) : "not recorded"],
      ["process", this.ranks.pid[rank] === null ? "not recorded" : this.ranks.pid[rank]],
      ["coordinates", this.axes.map((axis) => axis + " " + this.ranks.axes[axis][rank]).join(", ") || "not recorded"],
      ["end", end ? end[0] + " after step " + end[1] + (end[2] ? ": " + shown(end[2], 500) : "") : "no end is recorded"],
      ["incidents", about.length ? about.map((each) => [link("incident-" + each.number, each.number + " (" + word(each.manifestation) + ")"), mine(each.ranks) ? " named " : " waits "]) : "none"],
    ];
    this.detail.replaceChildren(h("h3", { id: "rank-detail" }, "Rank " + rank),
      h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  }
}

// One stop for the Tab key; arrow keys move within.
function roving(root, selector) {
  const items = [...root.querySelectorAll(selector)];
  if (items.length === 0) return;
  items.forEach((item, index) => item.setAttribute("tabindex", index === 0 ? "0" : "-1"));
  const perRow = root.tagName === "TABLE" ? root.querySelector("tbody tr").querySelectorAll(selector).length : 1;
  root.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: perRow, ArrowUp: -perRow, Home: -Infinity, End: Infinity };
    const from = items.indexOf(document.activeElement);
    if (!(event.key in moves) || from < 0) return;
    event.preventDefault();
    const to = items[Math.min(items.length - 1, Math.max(0, from + moves[event.key]))];
    items[from].setAttribute("tabindex", "-1");
    to.setAttribute("tabindex", "0");
    to.focus();
  });
}
