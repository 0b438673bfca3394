// Puts the page together.

function start() {
  const data = JSON.parse(byId("data").textContent);
  document.querySelector("main").hidden = false;
  title(data);
  cards(data);
  legend(data);
  const model = unpack(data), chart = new Chart(model, data);
  listen(chart);
  document.querySelectorAll("[data-do]").forEach((button) =>
    button.addEventListener("click", () => ACTIONS[button.dataset.do](chart)));
  byId("fit").addEventListener("change", (event) => {
    chart.view.fit = event.target.checked;
    chart.draw();
  });
  byId("by-time").addEventListener("change", (event) => chart.byTime(event.target.checked));
  byId("by-time-label").hidden = !model.seconds;
  kindTable(data);
  leakTable(data);
  tensorTable(chart);
  operationTable(data);
  provenance(data);
  chart.draw();
}

function title(data) {
  const name = printable(data.trace);
  document.title = "Memory of " + name;
  byId("title").textContent = "Memory of " + name;
  byId("subtitle").textContent = printable([
    counted(data.event_count, "event"), counted(data.op_count, "operation"),
    sayCount(data), "recorded on " + data.backend,
  ].join(" \u00b7 "));
}

function sayCount(data) {
  const first = data.first_step, last = first + data.step_count - 1;
  if (first === 1 || last < first) return counted(data.step_count, "step");
  return last === first ? "step " + first : "steps " + first + "-" + last;
}

function cards(data) {
  const { peak, vram } = data, step = data.step_count ? "step " + peak.step + ", " : "";
  const where = peak.op === null ? "event " + number(peak.event) : step + peak.phase + ", " + peak.op;
  card(bytes(peak.peak_bytes), "peak", where);
  byId("caveat").textContent = data.caveat ?? "";
  byId("caveat").hidden = data.caveat === null;
  if (vram) {
    card(percent(vram.peak_share), "of the VRAM of " + vram.gpu, bytes(vram.vram_bytes),
      vram.peak_share > 1);
  }
  if (data.host_seconds !== null) {
    const each = data.host_seconds_per_step;
    card(seconds(each ?? data.host_seconds), "host time" + (each === null ? "" : " a step"),
      "in operations, on the machine that recorded it");
  }
  card(bytes(peak.idle_bytes), "not used again", "alive at the peak, used by no later operation");
  const lost = data.outliving.reduce((sum, leak) => sum + leak.total_bytes, 0);
  if (data.steps.length > 1) {
    card(lost || data.outliving.length ? bytes(lost) : "none", "outlives its step",
      data.outliving.length ? "usually a leak" : "no sign of a leak", data.outliving.length > 0);
  }
}

function card(figure, what, more, alarm = false) {
  byId("cards").append(make("div", "card" + (alarm ? " alarm" : ""),
    make("b", "", figure), make("span", "", what), make("span", "", more)));
}

function legend(data) {
  const used = new Set(data.kinds_used);
  data.kinds.forEach((name, kind) => {
    if (used.has(kind)) byId("legend").append(make("li", "", swatch(kind), name));
  });
}

function provenance(data) {
  for (const [key, value] of data.provenance) {
    byId("provenance").append(make("dt", "", key), make("dd", "", value));
  }
}

start();
