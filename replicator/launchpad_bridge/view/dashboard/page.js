// Shows what the program says of itself; asks for nothing but its feed. Names are only
// ever set as text, never as HTML.
"use strict";

const three = (x) =>
  x === 0 ? "0" : x.toFixed(x >= 100 ? 0 : x >= 10 ? 1 : 2);
const rate = (x) =>
  x >= 100 ? Math.round(x).toLocaleString("en-US") : three(x);
const duration = (s) =>
  s < 1e-3 ? `${(s * 1e6).toFixed(0)} µs`
    : s < 1 ? `${three(s * 1e3)} ms`
      : s < 120 ? `${three(s)} s`
        : s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
const size = (bytes) => {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 1000) return `${three(bytes)} ${unit}`;
    bytes /= 1000;
  }
  return `${three(bytes)} TB`;
};

const byId = (id) => document.getElementById(id);
const drawn = new Map(
  [...document.querySelectorAll(".worker")].map((g) => [g.dataset.worker, g]));
const arrows = [...document.querySelectorAll(".arrow")];

// As the supervisor names it; of who has ended, how.
const stateOf = (worker) =>
  worker.state === "ended" && worker.outcome ? worker.outcome : worker.state;

function showWorker(worker) {
  const g = drawn.get(worker.name);
  if (!g) return;
  const state = stateOf(worker);
  g.dataset.state = state;
  const [first, second] = g.querySelectorAll(".note");
  first.textContent =
    worker.restarts ? `${state}, restart ${worker.restarts}` : state;
  const serves = Object.keys(worker.methods).length > 0;
  second.textContent = serves ? `${rate(worker.calls_per_s)} calls/s`
    : worker.made_per_s ? `makes ${rate(worker.made_per_s)}/s` : "";
}

function showArrow(arrow, index) {
  const g = arrows[index];
  const busy = arrow.calls_per_s > 0;
  g.classList.toggle("busy", busy);
  // A thousand calls are thicker than a hundred, not ten times as thick.
  const width = busy ? Math.min(5.5, 1.4 + Math.log10(1 + arrow.calls_per_s)) : 1.4;
  g.querySelector("path").setAttribute("stroke-width", width.toFixed(2));
  g.querySelector(".traffic").textContent =
    !busy ? "" : !arrow.bytes_per_s ? `${rate(arrow.calls_per_s)}/s`
      : `${rate(arrow.calls_per_s)}/s · ${size(arrow.bytes_per_s)}/s`;
}

function row(cells, name) {
  const tr = document.createElement("tr");
  if (name) tr.className = name;
  for (const cell of cells) {
    tr.append(Object.assign(document.createElement("td"), { textContent: cell }));
  }
  return tr;
}

const numbers = (of) => [
  rate(of.calls_per_s), of.p50_s ? duration(of.p50_s) : "-",
  of.p99_s ? duration(of.p99_s) : "-", size(of.bytes_per_s), of.queued, of.running];

function rowsOf(worker) {
  const methods = Object.entries(worker.methods);
  const counts = [worker.name, worker.text, stateOf(worker), worker.restarts,
    worker.made_per_s ? rate(worker.made_per_s) : "-"];
  const silent = worker.answers === false && worker.state === "running";
  const main = row([...counts, ...(methods.length ? numbers(worker)
    : [silent ? "no answer" : "-", "-", "-", "-", "-", "-"])]);
  main.dataset.state = stateOf(worker);
  main.dataset.row = worker.name;
  main.children[2].className = "state";
  if (worker.error) main.title = worker.error;
  const called = methods.filter(([, method]) => method.calls);
  return [main, ...(called.length < 2 ? [] : called.map(([name, method]) =>
    row([name, "", "", "", "", ...numbers(method)], "method")))];
}

function say(text) {
  byId("message").hidden = !text;
  byId("message").textContent = text;
}

function show(said) {
  document.body.dataset.phase = said.phase;
  document.body.toggleAttribute("data-failed", said.failure !== "");
  byId("phase").textContent = said.phase;
  const began = Math.min(...said.workers.map((w) => w.since_s || said.at_s));
  byId("about").textContent = `${said.workers.length} nodes, for ` +
    `${duration(said.at_s - began)}, launched by process ${said.pid}`;
  const waiting = said.workers.filter((w) => w.state === "waiting" && w.error);
  say(said.failure || waiting.map((w) => w.error).join("\n"));
  said.workers.forEach(showWorker);
  if (said.phase === "ended") { // what servers said last stays to be read
    const ends = new Map(said.workers.map((worker) => [worker.name, stateOf(worker)]));
    for (const tr of document.querySelectorAll("[data-row]")) {
      tr.dataset.state = tr.cells[2].textContent = ends.get(tr.dataset.row);
    }
    return;
  }
  said.arrows.forEach(showArrow);
  byId("workers").tBodies[0].replaceChildren(...said.workers.flatMap(rowsOf));
}

const feed = new EventSource("feed");
feed.addEventListener("sample", (event) => {
  document.body.classList.remove("lost");
  const said = JSON.parse(event.data);
  show(said);
  document.body.dataset.updates = Number(document.body.dataset.updates) + 1;
  if (said.phase === "ended") {
    feed.close();
    document.body.classList.add("lost");
    if (!said.failure) {
      say(said.stopped_by ? `Stopped by ${said.stopped_by}.` : "Ended well.");
    }
  }
});
feed.addEventListener("error", () => {
  if (document.body.dataset.phase === "ended") return;
  document.body.classList.add("lost");
  say("The program cannot be reached: it may have ended. Trying again.");
});
