// Tables that sort by their headings, and what the page says beside the chart.

const ROWS = 15;

// columns: {title, value: row => what to sort by, show: row => text or node, number, wide}
function sortable(box, columns, rows, options = {}) {
  const state = { column: options.sort ?? 0, down: true, shown: ROWS };
  const draw = () => {
    const { value } = columns[state.column];
    const sorted = rows().slice().sort((a, b) => compare(value(a), value(b)));
    if (state.down) sorted.reverse();
    const shown = sorted.slice(0, state.shown);
    box.replaceChildren(tableOf(columns, shown, state, draw, options), more(sorted, state, draw));
  };
  draw();
  return draw;
}

function compare(a, b) {
  if (typeof a === "string") return -a.localeCompare(b);
  return a - b;
}

function tableOf(columns, rows, state, draw, options) {
  const head = make("tr");
  columns.forEach((column, index) => head.append(heading(column, index, state, draw)));
  const body = make("tbody");
  for (const row of rows) {
    const line = make("tr");
    for (const column of columns) {
      const shown = column.show ? column.show(row) : column.value(row);
      line.append(make("td", classOf(column), shown));
    }
    options.onRow?.(line, row);
    body.append(line);
  }
  return make("table", "", make("thead", "", head), body);
}

function heading(column, index, state, draw) {
  const button = make("button", "", column.title);
  button.type = "button";
  button.addEventListener("click", () => {
    state.down = state.column === index ? !state.down : true;
    state.column = index;
    draw();
  });
  const cell = make("th", classOf(column), button);
  if (state.column === index) {
    const up = typeof column.up === "undefined" ? !state.down : state.down;
    cell.setAttribute("aria-sort", up ? "ascending" : "descending");
  }
  return cell;
}

function classOf(column) {
  return [column.number ? "number" : "", column.wide ? "wide" : ""].join(" ").trim();
}

function more(sorted, state, draw) {
  const left = sorted.length - state.shown;
  if (left <= 0) return "";
  const button = make("button", "more", "show " + Math.min(left, ROWS) + " more of " + number(left));
  button.type = "button";
  button.addEventListener("click", () => { state.shown += ROWS; draw(); });
  return button;
}

// -- tensors ------------------------------------------------------------------------------------

function tensorTable(chart) {
  const { model, data } = chart, peak = data.peak.event;
  const atPeak = (t) => t.birth <= peak && peak < t.death;
  const maker = (t) => t.maker ? t.maker[0] + ", " + t.maker[1] : sayOrigin(model, t);
  const find = byId("find"), only = byId("only-peak");
  const columns = [
    { title: "tensor", value: (t) => t.label, up: 1 },
    { title: "size", value: (t) => t.nbytes, show: (t) => bytes(t.nbytes), number: 1 },
    { title: "kind", value: (t) => model.kinds[t.kind], up: 1,
      show: (t) => make("span", "", swatch(t.kind), model.kinds[t.kind]) },
    { title: "made by", value: maker, wide: 1, up: 1 },
    { title: "step", value: (t) => t.step, show: (t) => String(t.step), number: 1, wide: 1 },
    { title: "born", value: (t) => t.birth, show: (t) => number(t.birth), number: 1, wide: 1 },
    { title: "freed", value: (t) => t.death, number: 1, wide: 1,
      show: (t) => t.freed ? number(t.death) : "never" },
    { title: "events", value: (t) => t.death - t.birth, show: (t) => number(t.death - t.birth),
      number: 1 },
  ];
  const rows = () => {
    const wanted = find.value.trim().toLowerCase();
    return model.tensors.filter((t) => (!only.checked || atPeak(t)) &&
      (!wanted || (t.label + " " + maker(t) + " " + model.kinds[t.kind] + " " + t.stack.join(" "))
        .toLowerCase().includes(wanted)));
  };
  const draw = sortable(byId("tensors"), columns, rows, { sort: 1, onRow: linkTo(chart) });
  find.addEventListener("input", draw);
  only.addEventListener("change", draw);
  const folded = data.tensor_count - model.tensors.length;
  byId("tensors-note").textContent = folded
    ? `The ${number(model.tensors.length)} largest; ${counted(folded, "smaller one")} folded together.`
    : "All of them.";
}

function linkTo(chart) {
  return (line, tensor) => {
    line.className = "link";
    line.dataset.tensor = tensor.index;
    line.title = "show it in the chart";
    line.addEventListener("click", () => {
      chart.around(tensor.birth, tensor.death);
      choose(chart, tensor.index);
      chart.box.scrollIntoView({ block: "center", behavior: "auto" });
    });
  };
}

// -- operations, kinds, leaks -------------------------------------------------------------------

function operationTable(data) {
  const total = data.host_seconds, timed = total !== null;
  const columns = [
    { title: "operation", value: (o) => o.name, up: 1 },
    { title: "phase", value: (o) => o.phase, wide: 1, up: 1 },
    { title: "count", value: (o) => o.count, show: (o) => number(o.count), number: 1, wide: 1 },
    { title: "host time", value: (o) => o.seconds ?? -1, show: (o) => seconds(o.seconds), number: 1 },
    { title: "share", value: (o) => o.seconds ?? -1, number: 1, wide: 1,
      show: (o) => timed && total ? percent((o.seconds ?? 0) / total) : "-" },
    { title: "allocated", value: (o) => o.allocated_bytes, show: (o) => bytes(o.allocated_bytes),
      number: 1 },
    { title: "workspace", value: (o) => o.workspace_bytes ?? -1, number: 1, wide: 1,
      show: (o) => o.workspace_bytes === null ? "-" : bytes(o.workspace_bytes) },
  ];
  sortable(byId("operations"), columns, () => data.operations, { sort: timed ? 3 : 5 });
}

function kindTable(data) {
  const total = Math.max(1, data.peak.peak_bytes);
  const columns = [
    { title: "kind", value: (k) => data.kinds.indexOf(k.kind),
      show: (k) => make("span", "", swatch(data.kinds.indexOf(k.kind)), k.kind) },
    { title: "size", value: (k) => k.total_bytes, show: (k) => bytes(k.total_bytes), number: 1 },
    { title: "share", value: (k) => k.total_bytes, number: 1,
      show: (k) => percent(k.total_bytes / total) },
    { title: "tensors", value: (k) => k.tensor_count, number: 1, wide: 1,
      show: (k) => k.tensor_count ? number(k.tensor_count) : "-" },
    { title: "of the peak", value: (k) => k.total_bytes, wide: 1,
      show: (k) => barOf(k.total_bytes / total, data.kinds.indexOf(k.kind)) },
  ];
  sortable(byId("kinds"), columns, () => data.peak.by_kind, { sort: 1 });
}

function barOf(share, kind) {
  const inner = make("i");
  inner.style.width = 100 * share + "%";
  inner.style.background = `var(--k${kind})`;
  return make("div", "bar", inner);
}

function leakTable(data) {
  const box = byId("outliving");
  if (!data.outliving.length) {
    box.append(make("p", "", data.no_outliving));
    return;
  }
  const columns = [
    { title: "tensor", value: (l) => l.label, up: 1,
      show: (l) => make("div", "", l.label, ...l.stack.map((line) => codeLine("place", line))) },
    { title: "size", value: (l) => l.total_bytes, show: (l) => bytes(l.total_bytes), number: 1 },
    { title: "count", value: (l) => l.tensor_count, show: (l) => number(l.tensor_count), number: 1 },
    { title: "made by", value: (l) => l.op ?? "-", wide: 1, up: 1,
      show: (l) => l.op === null ? "-" : l.op + ", " + l.phase },
    { title: "kind", value: (l) => l.kind, wide: 1, up: 1 },
    { title: "in steps", value: (l) => l.steps[0] ?? -1, wide: 1, number: 1,
      show: (l) => l.steps.slice(0, 6).join(", ") + (l.steps.length > 6 ? ", ..." : "") },
    { title: "before", value: (l) => l.earlier_count, show: (l) => number(l.earlier_count),
      wide: 1, number: 1 },
    { title: "freed later", value: (l) => l.freed_count, number: 1, wide: 1,
      show: (l) => number(l.freed_count) },
  ];
  sortable(box, columns, () => data.outliving, { sort: 1 });
}
