// A page that `scout watch` serves asks twice a second for what has changed, and draws that again.

const POLL_MS = 500;

function nowView(data) {
  if (!data.now) return null;
  const now = data.now;
  const states = now.states.map((each) => number(each.count) + " " + nameOf(each.state) + ": " + rankList(each.ranks)).join("; ");
  const silent = (rank) => (rank.silent_seconds === null ? "" : rank.silent_seconds.toFixed(1));
  const rows = now.ranks.map((rank) => () => [rank.rank, nameOf(rank.host), nameOf(rank.state), rank.step === null ? "" : rank.step, rank.phase || "",
    silent(rank), [rank.inside ? shown(rank.inside, 300) : "", rank.device ? h("small", {}, " device: " + nameOf(rank.device)) : ""]]);
  return section("now", "Now", h("p", {}, capital(shown(now.sentence, 1500)) + "."),
    now.checks && h("p", {}, shown(now.checks, 800)),
    states && h("p", { class: "hint" }, states + (now.unlisted ? "; the table has those that need attention most" : "") + (now.hosts.length ? "; scout watch on their machines shows more about the ranks elsewhere" : "") + "."),
    rows.length > 0 && longTable(["rank", "machine", "state", "step", "phase", "silent s", "inside"], rows, "ranks now", NARROW ? 4 : 8));
}

function live(data) {
  const place = document.getElementById("live"), token = new URLSearchParams(location.search).get("token");
  const headers = token === null ? {} : { Authorization: "Bearer " + token };
  let known = data.incidents.length;
  const say = (kind, ...parts) => { place.className = kind; place.replaceChildren(...parts.map((each) => (each instanceof Node ? each : document.createTextNode(each)))); };
  const poll = async () => {
    try {
      const answer = await fetch("data.json?after=" + encodeURIComponent(data.version), { headers, cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status === 403 ? "the token is refused" : "the answer has status " + answer.status);
      const found = await answer.json(), changed = Object.keys(found.parts);
      Object.assign(data, found.parts, { version: found.version });
      if (changed.length > 0) render(data, changed);
      if (data.incidents.length > known) say("is-new", plural(data.incidents.length - known, "new incident") + " since this page was opened. ", link("incident-" + data.incidents.length, "Show the last one"));
      else if (!place.classList.contains("is-new")) say("is-live", "Live: this page follows the run.");
    } catch (error) {
      say("is-lost", "No answer from scout watch (" + shown(error.message, 200) + "). The page shows what it last heard.");
    }
    setTimeout(poll, POLL_MS);
  };
  say("is-live", "Live: this page follows the run.");
  setTimeout(poll, POLL_MS);
}
