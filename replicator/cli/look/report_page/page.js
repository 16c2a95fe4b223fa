// Draw the curves, and draw them anew when a control, the width or the theme changes.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const controls = document.getElementById("controls");
  const plots = [...document.querySelectorAll(".plot")];
  const MOST_LABELS = 12;
  const config = { displayModeBar: false, responsive: true };

  // plotly.js is most of the page, and packed.
  async function unpack() {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    const gzip = new DecompressionStream("gzip");
    const script = document.createElement("script");
    script.textContent = await new Response(
      new Blob([bytes]).stream().pipeThrough(gzip)
    ).text();
    document.head.append(script);
  }
  const unpacked = controls && unpack();

  const color = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // An average that forgets: the weight of the newest value is 1 - keep. The first
  // values are not pulled towards zero, and a gap stays a gap.
  function smoothed(values, keep) {
    let sum = 0;
    let weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = keep * sum + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return sum / weight;
    });
  }

  function trace(line, over, values, tone, width, told) {
    return {
      x: over.of(line), y: values, mode: values.length > 1 ? "lines" : "markers",
      line: { color: color(tone), width }, marker: { color: color(tone) },
      hovertemplate: "%{y:.5g}<extra></extra>",
      hoverinfo: told ? undefined : "skip", connectgaps: false, showlegend: false,
    };
  }

  function traces(curve, choice) {
    const keep = Number(choice.smooth);
    const { over } = choice;
    const drawn = choice.earlier
      ? curve.earlier.map((line) => trace(line, over, line.values, "old", 1, false))
      : [];
    for (const each of drawn) delete each.hovertemplate;
    const { line } = curve;
    if (keep > 0) {
      const faint = trace(line, over, line.values, "raw", 1, false);
      delete faint.hovertemplate;
      drawn.push(faint);
    }
    drawn.push(trace(line, over, smoothed(line.values, keep), "line", 1.5, true));
    return drawn;
  }

  // What is on the axis: the points of a line, and where a step is among them.
  const STEPS = { of: (line) => line.steps, place: (line, step) => step, unit: "" };

  function time() {
    const longest = Math.max(0, ...data.curves.map((curve) => curve.line.seconds.at(-1)));
    const [length, unit] =
      longest > 7200 ? [3600, "h"] : longest > 120 ? [60, "min"] : [1, "s"];
    const of = (line) => line.seconds.map((second) => second / length);
    const place = (line, step) => {
      const index = line.steps.findIndex((each) => each >= step);
      return of(line).at(index);
    };
    return { of, place, unit: ` ${unit}` };
  }

  function shapes(curve, choice) {
    if (!choice.marks) return [];
    return data.marks.map((mark) => {
      const at = choice.over.place(curve.line, mark.step);
      return {
        type: "line", yref: "paper", y0: 0, y1: 1, x0: at, x1: at, layer: "below",
        line: { color: color(mark.tone), width: 1, dash: "dot" },
      };
    });
  }

  function labels(curve, choice, height) {
    if (!choice.marks || data.marks.length > MOST_LABELS || height < 140) return [];
    return data.marks.map((mark) => ({
      text: mark.kind, x: choice.over.place(curve.line, mark.step), xanchor: "right",
      yref: "paper", y: 1, yanchor: "top", textangle: -90, showarrow: false,
      borderpad: 0, font: { size: 9, color: color(mark.tone) },
    }));
  }

  function layout(curve, choice, height) {
    const axis = {
      gridcolor: color("grid"), zeroline: false, linecolor: color("edge"),
      tickfont: { size: 11 }, automargin: true, nticks: 6,
    };
    return {
      margin: { l: 8, r: 8, t: 6, b: 4 }, hovermode: "x", dragmode: "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "inherit", color: color("dim"), size: 11 },
      hoverlabel: { bgcolor: color("card"), font: { color: color("text") } },
      xaxis: { ...axis, ticksuffix: choice.over.unit },
      yaxis: {
        ...axis, type: choice.scale, minexponent: curve.bytes ? 3 : 5,
        exponentformat: curve.bytes ? "SI" : "power", separatethousands: true,
      },
      shapes: shapes(curve, choice), annotations: labels(curve, choice, height),
      uirevision: `${choice.x} ${choice.scale}`,
    };
  }

  function chosen() {
    const fields = new FormData(controls);
    return {
      x: fields.get("x"), over: fields.get("x") === "time" ? time() : STEPS,
      scale: fields.get("scale"), smooth: fields.get("smooth"),
      marks: fields.has("marks"), earlier: fields.has("earlier"),
    };
  }

  async function draw() {
    await unpacked;
    const choice = chosen();
    for (const plot of plots) {
      const curve = data.curves[Number(plot.dataset.curve)];
      const shape = layout(curve, choice, plot.clientHeight);
      await Plotly.react(plot, traces(curve, choice), shape, config);
    }
    document.body.dataset.drawn = String(plots.length);
  }

  if (controls) {
    draw();
    controls.addEventListener("input", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }
  for (const button of document.querySelectorAll("figcaption button")) {
    button.addEventListener("click", async () => {
      await unpacked;
      const figure = button.closest("figure");
      figure.classList.toggle("wide");
      Plotly.Plots.resize(figure.querySelector(".plot"));
    });
  }
  for (const box of document.querySelectorAll(".kinds input")) {
    box.addEventListener("change", () => {
      for (const row of document.querySelectorAll(".events tbody tr")) {
        if (row.dataset.kind === box.dataset.kind) row.hidden = !box.checked;
      }
    });
  }
})();
