// Shows the texts that the program's feed sends; asks for nothing else. Names are only
// ever set as text, never as HTML.
"use strict";

const byId = (id) => document.getElementById(id);
const drawn = new Map(
  [...document.querySelectorAll(".worker")].map((g) => [g.dataset.worker, g]));
const arrows = [...document.querySelectorAll(".arrow")];

function showWorker(worker) {
  const g = drawn.get(worker.name);
  if (!g) return;
  g.dataset.state = worker.state;
  g.querySelectorAll(".note").forEach((note, index) => {
    note.textContent = worker.notes[index];
  });
}

function showArrow(arrow, index) {
  const g = arrows[index];
  const busy = arrow.calls_per_s > 0;
  g.classList.toggle("busy", busy);
  // A thousand calls are thicker than a hundred, not ten times as thick.
  const width = busy ? Math.min(5.5, 1.4 + Math.log10(1 + arrow.calls_per_s)) : 1.4;
  g.querySelector("path").setAttribute("stroke-width", width.toFixed(2));
  g.querySelector(".traffic").textContent = arrow.text;
}

function row(cells, name) {
  const tr = document.createElement("tr");
  if (name) tr.className = name;
  for (const cell of cells) {
    tr.append(Object.assign(document.createElement("td"), { textContent: cell }));
  }
  return tr;
}

function rowsOf(worker) {
  const [first, ...methods] = worker.rows;
  const main = row(first);
  main.dataset.state = worker.state;
  main.dataset.row = worker.name;
  main.children[2].className = "state";
  if (worker.error) main.title = worker.error;
  return [main, ...methods.map((cells) => row(cells, "method"))];
}

function showMessage(text) {
  byId("message").hidden = !text;
  byId("message").textContent = text;
}

function show(sample) {
  document.body.dataset.phase = sample.phase;
  document.body.toggleAttribute("data-failed", sample.failure !== "");
  byId("phase").textContent = sample.phase;
  byId("about").textContent = sample.about;
  const waiting = sample.workers.filter((w) => w.state === "waiting" && w.error);
  showMessage(sample.failure || waiting.map((w) => w.error).join("\n"));
  sample.shown.forEach(showWorker);
  if (sample.phase === "ended") { // the last numbers of the servers stay to be read
    const ends = new Map(sample.shown.map((worker) => [worker.name, worker.state]));
    for (const tr of document.querySelectorAll("[data-row]")) {
      tr.dataset.state = tr.cells[2].textContent = ends.get(tr.dataset.row);
    }
    return;
  }
  sample.arrows.forEach(showArrow);
  byId("workers").tBodies[0].replaceChildren(...sample.shown.flatMap(rowsOf));
}

const feed = new EventSource("feed");
feed.addEventListener("sample", (event) => {
  document.body.classList.remove("lost");
  const sample = JSON.parse(event.data);
  show(sample);
  document.body.dataset.updates = Number(document.body.dataset.updates) + 1;
  if (sample.phase === "ended") {
    feed.close();
    document.body.classList.add("lost");
    if (!sample.failure) {
      showMessage(sample.stopped_by ? `Stopped by ${sample.stopped_by}.` : "Ended well.");
    }
  }
});
feed.addEventListener("error", () => {
  if (document.body.dataset.phase === "ended") return;
  document.body.classList.add("lost");
  showMessage("The program cannot be reached: it may have ended. Trying again.");
});
