// What the pointer and the keys do to the chart, and what is said of the band under it.

function listen(chart) {
  const { box, map } = chart;
  box.addEventListener("pointermove", (event) => {
    if (chart.drag) dragTo(chart, event);
    else point(chart, event);
  });
  box.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const { x } = inside(chart, event);
    chart.drag = { from: x, to: x, moved: false };
    box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointerup", (event) => release(chart, event));
  box.addEventListener("pointercancel", () => { chart.drag = null; leave(chart); });
  box.addEventListener("pointerleave", () => { if (!chart.drag) leave(chart); });
  box.addEventListener("dblclick", () => chart.all());
  box.addEventListener("wheel", (event) => wheel(chart, event), { passive: false });
  box.addEventListener("keydown", (event) => key(chart, event));
  map.addEventListener("pointerdown", (event) => {
    map.setPointerCapture(event.pointerId);
    centre(chart, event);
  });
  map.addEventListener("pointermove", (event) => { if (event.buttons) centre(chart, event); });
}

function inside(chart, event) {
  const rect = chart.box.getBoundingClientRect();
  return { x: event.clientX - rect.left, y: event.clientY - rect.top };
}

function dragTo(chart, event) {
  const { x } = inside(chart, event);
  chart.drag.to = Math.min(Math.max(x, GUTTER), chart.size.width);
  chart.drag.moved ||= Math.abs(x - chart.drag.from) > 4;
  chart.drawOver();
}

function release(chart, event) {
  const drag = chart.drag;
  chart.drag = null;
  if (!drag) return;
  if (drag.moved) {
    const place = (x) => chart.view.low + (chart.view.high - chart.view.low) *
      (Math.max(x, GUTTER) - GUTTER) / (chart.width / chart.ratio);
    chart.show(place(Math.min(drag.from, drag.to)), place(Math.max(drag.from, drag.to)));
    return;
  }
  const { x, y } = inside(chart, event), found = chart.at(x, y);
  const id = found && found.band ? found.band.id : null;
  choose(chart, id === chart.chosen ? null : id);
  point(chart, event);
}

function wheel(chart, event) {
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    const { x } = inside(chart, event);
    const at = Math.min(1, Math.max(0, (x - GUTTER) / (chart.size.width - GUTTER)));
    chart.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 100), at);
  } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    chart.move(event.deltaX / chart.size.width);
  }
}

function key(chart, event) {
  const done = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out",
    0: "all", p: "peak" }[event.key];
  if (event.key === "Escape") choose(chart, null);
  if (!done || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  ACTIONS[done](chart);
}

const ACTIONS = {
  in: (chart) => chart.zoom(0.5),
  out: (chart) => chart.zoom(2),
  left: (chart) => chart.move(-0.25),
  right: (chart) => chart.move(0.25),
  all: (chart) => chart.all(),
  peak: (chart) => chart.peak(),
};

function centre(chart, event) {
  const rect = chart.map.getBoundingClientRect();
  const at = extent(chart.model, chart.view) * (event.clientX - rect.left) / rect.width;
  const half = (chart.view.high - chart.view.low) / 2;
  chart.show(at - half, at + half);
}

function choose(chart, id) {
  chart.chosen = id !== null && id >= 0 ? id : null;
  document.querySelectorAll("#tensors tr.chosen").forEach((row) => row.classList.remove("chosen"));
  document.querySelector(`#tensors tr[data-tensor="${chart.chosen}"]`)?.classList.add("chosen");
  chart.drawOver();
}

// -- what is said -------------------------------------------------------------------------------

function leave(chart) {
  chart.pointed = null;
  byId("tip").hidden = true;
  byId("readout").textContent = "\u00a0";
  chart.drawOver();
}

function point(chart, event) {
  const { x, y } = inside(chart, event), found = chart.at(x, y);
  if (!found) return leave(chart);
  byId("readout").textContent = printable(sayEvent(chart, found.event));
  const id = found.band ? found.band.id : null;
  if (id !== chart.pointed) {
    chart.pointed = id;
    chart.drawOver();
  }
  const tip = byId("tip");
  tip.hidden = !found.band;
  if (found.band) fillTip(chart, tip, found, x, y);
}

function sayEvent(chart, event) {
  const { model, data } = chart, op = model.op[event];
  const parts = ["event " + number(event) + " of " + number(model.count)];
  if (event < data.before_count) parts.push("there when the recording began");
  else if (data.steps.length) {
    parts.push("step " + (data.first_step + data.steps.filter((end) => end < event).length));
  }
  if (event >= data.before_count && op >= 0) parts.push(data.op_names[op][1], data.op_names[op][0]);
  parts.push(bytes(model.total[event]) + " in use");
  return parts.join(" \u00b7 ");
}

function fillTip(chart, tip, found, x, y) {
  const { id, kind, nbytes } = found.band;
  const lines = id < 0 ? sayFolded(chart, kind, nbytes) : sayTensor(chart, chart.model.tensors[id]);
  tip.replaceChildren(...lines);
  tip.dataset.tensor = id;
  tip.dataset.event = found.event;
  const left = x + 16 + tip.offsetWidth > chart.size.width ? x - 16 - tip.offsetWidth : x + 16;
  tip.style.left = Math.max(0, Math.min(left, chart.size.width - tip.offsetWidth)) + "px";
  const below = y + 14, above = y - 14 - tip.offsetHeight;
  const lowest = chart.size.height + 60 - tip.offsetHeight; // it may cover the map
  const top = below > lowest && above > 0 ? above : below;
  tip.style.top = Math.max(0, Math.min(top, lowest)) + "px";
}

function sayFolded(chart, kind, nbytes) {
  const name = chart.model.kinds[kind];
  const what = name === "workspace" ? "workspace of the operation" : "small tensors: " + name;
  return [make("b", "", what), make("span", "", swatch(kind), bytes(nbytes) + " together")];
}

function sayOrigin(model, tensor) {
  if (!tensor.uploaded) return "no operation seen";
  return model.kinds[tensor.kind] === "input" ? "the host" : "before the recording";
}

function sayTensor(chart, tensor) {
  const { model, data } = chart;
  const end = tensor.freed ? "event " + number(tensor.death) : "the end";
  const made = tensor.maker ? "made by " + tensor.maker[0] + ", " + tensor.maker[1]
    : tensor.uploaded ? "from " + sayOrigin(model, tensor) : sayOrigin(model, tensor);
  const last = tensor.lastUse < 0 ? null : data.op_names[model.op[tensor.lastUse]];
  const lines = [
    make("b", "", tensor.label),
    make("div", "", swatch(tensor.kind), bytes(tensor.nbytes) + ", " + model.kinds[tensor.kind]),
    make("div", "", made + (tensor.maker && data.steps.length ? ", step " + tensor.step : "")),
    make("div", "quiet", "alive from event " + number(tensor.birth) + " to " + end),
  ];
  if (last) {
    lines.push(make("div", "quiet", "last used at event " + number(tensor.lastUse) + " by " +
      last[0] + ", " + last[1]));
  }
  for (const line of tensor.stack.slice(0, 4)) lines.push(codeLine("stack quiet", line));
  return lines;
}
