// Axes, marks and the map under the chart.

function drawAxes(chart, context) {
  const { ink, model, data, size } = chart;
  const right = size.width, base = chart.y(0);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  const step = niceStep(chart.top);
  for (let level = 0; level <= chart.top; level += step) {
    context.fillStyle = ink.css("quiet");
    context.fillText(bytes(level).replace(".0 ", " "), GUTTER - 6, chart.y(level));
    context.fillStyle = level ? "rgba(128, 128, 128, .25)" : ink.css("quiet");
    context.fillRect(GUTTER, chart.y(level), right - GUTTER, 1);
  }
  drawPhases(chart, context, base + 1);
  drawPlaces(chart, context, base + STRIP + 2);
  drawSteps(chart, context, base);
  drawPeak(chart, context, base);
  if (data.vram) drawVram(chart, context, right);
}

function niceStep(top) {
  let unit = 1;
  while (unit * 1024 <= top) unit *= 1024;
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500];
  return unit * (steps.find((step) => top / (unit * step) <= 6) ?? 500);
}

// What ran in each stretch: neighbouring columns of the same phase are one box.
function drawPhases(chart, context, top) {
  const { model, data, events, ratio } = chart;
  const phaseOf = (event) => event < data.before_count ? "before"
    : model.op[event] >= 0 ? data.op_names[model.op[event]][1] : "";
  context.textAlign = "center";
  for (let first = 0; first < events.length;) {
    const phase = phaseOf(events[first]);
    let last = first;
    while (last < events.length && phaseOf(events[last]) === phase) last++;
    const left = GUTTER + first / ratio, width = (last - first) / ratio;
    context.fillStyle = { forward: "rgba(70,130,200,.35)", backward: "rgba(210,80,95,.32)",
      update: "rgba(125,98,189,.5)", array: "rgba(110,140,160,.35)" }[phase] ?? "transparent";
    context.fillRect(left, top, width, STRIP - 2);
    if (width > context.measureText(phase).width + 8) {
      context.fillStyle = chart.ink.css("ink");
      context.fillText(phase, left + width / 2, top + (STRIP - 2) / 2 + 0.5);
    }
    first = last;
  }
}

function drawPlaces(chart, context, top) {
  const { view, ink } = chart, middle = top + BOTTOM / 2 - 4;
  const say = (at) => view.byTime ? seconds(at / 1e6) : "event " + number(Math.round(at));
  context.fillStyle = ink.css("quiet");
  context.textAlign = "left";
  context.fillText(say(view.low), GUTTER, middle);
  context.textAlign = "right";
  context.fillText(say(view.high), chart.size.width - 1, middle);
}

function drawSteps(chart, context, base) {
  const { model, data, view, ink } = chart;
  let before = 0;
  data.steps.forEach((event, step) => {
    const at = position(model, view, event), x = chart.x(at);
    if (x >= GUTTER && x <= chart.size.width) {
      context.fillStyle = ink.css("ink");
      context.globalAlpha = 0.55;
      context.fillRect(x, TOP - 14, 1, base - TOP + 14);
      context.globalAlpha = 1;
    }
    const left = Math.max(GUTTER, chart.x(before)), right = Math.min(chart.size.width, x);
    const label = "step " + (data.first_step + step);
    if (right - left > context.measureText(label).width + 10) {
      context.fillStyle = ink.css("quiet");
      context.textAlign = "center";
      context.fillText(label, (left + right) / 2, TOP - 10);
    }
    before = at;
  });
}

function drawPeak(chart, context, base) {
  const { model, data, view, ink } = chart;
  const x = chart.x(position(model, view, data.peak.event) + (view.byTime ? 0 : 0.5));
  if (x < GUTTER || x > chart.size.width || !data.peak.peak_bytes) return;
  const y = chart.y(data.peak.peak_bytes);
  context.strokeStyle = ink.css("ink");
  context.setLineDash([3, 3]);
  line(context, x, y, x, base);
  context.setLineDash([]);
  context.fillStyle = ink.css("ink");
  context.beginPath();
  context.arc(x, y, 4, 0, 2 * Math.PI);
  context.fill();
  label(chart, context, "peak " + bytes(data.peak.peak_bytes), x, y + 14, ink.css("ink"));
}

function drawVram(chart, context, right) {
  const { data, ink } = chart, { gpu, vram_bytes: nbytes } = data.vram;
  const inside = nbytes <= chart.top, y = inside ? chart.y(nbytes) : TOP + 8;
  const text = "VRAM of " + printable(gpu) + ", " + bytes(nbytes);
  context.strokeStyle = ink.css("alarm");
  if (inside) {
    context.setLineDash([7, 4]);
    line(context, GUTTER, y, right, y);
    context.setLineDash([]);
  }
  const said = inside ? text : "\u2191 " + text;
  label(chart, context, said, GUTTER + 4, inside ? y + 10 : y, ink.css("alarm"));
}

function line(context, ...[x0, y0, x1, y1]) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

// Text on a plate, beside x and inside the chart.
function label(chart, context, text, x, y, color) {
  const width = context.measureText(text).width;
  const left = x + 8 + width > chart.size.width ? x - 8 - width : x + 8;
  context.fillStyle = chart.ink.css("halo");
  context.fillRect(left - 3, y - 8, width + 6, 16);
  context.fillStyle = color;
  context.textAlign = "left";
  context.fillText(text, left, y + 0.5);
}

// The band of one tensor, wherever it is in sight.
function drawOutline(chart, context, id) {
  const walk = new Walk(chart.model), tensor = chart.model.tensors[id];
  context.fillStyle = chart.ink.css("ink");
  for (let column = 0; column < chart.width; column++) {
    const event = chart.events[column];
    if (event < tensor.birth || event >= tensor.death) continue;
    walk.to(event);
    walk.bands((band, kind, from, to) => {
      if (band !== id) return false;
      const top = chart.y(to), height = Math.max(1, chart.y(from) - top);
      context.globalAlpha = 0.55;
      context.fillRect(GUTTER + column / chart.ratio, top, 1 / chart.ratio, height);
      return true;
    });
  }
  context.globalAlpha = 1;
}

function drawSelection(chart, context) {
  const left = Math.min(chart.drag.from, chart.drag.to);
  context.fillStyle = chart.ink.css("accent");
  context.globalAlpha = 0.25;
  context.fillRect(left, TOP, Math.abs(chart.drag.to - chart.drag.from), chart.y(0) - TOP);
  context.globalAlpha = 1;
}

// All of the trace in small, with a frame around what the chart shows.
function drawMap(chart) {
  const { map, model, view, ink, ratio } = chart, rect = map.getBoundingClientRect();
  const width = Math.floor(rect.width * ratio), height = Math.floor(rect.height * ratio);
  Object.assign(map, { width, height });
  const context = map.getContext("2d"), whole = extent(model, view);
  const events = columnEvents(model, { ...view, low: 0, high: whole }, width);
  context.fillStyle = ink.css("line");
  for (let column = 0; column < width; column++) {
    const tall = height * model.total[events[column]] / Math.max(1, chart.data.peak.peak_bytes);
    context.fillRect(column, height - tall, 1, tall);
  }
  context.strokeStyle = ink.css("accent");
  context.lineWidth = 2 * ratio;
  const left = view.low / whole * width, right = view.high / whole * width;
  context.strokeRect(left + ratio, ratio, Math.max(2, right - left - 2 * ratio), height - 2 * ratio);
}
