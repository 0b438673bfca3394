"use strict";
// The trace as the page gets it, unpacked into arrays by event.

function unpack(data) {
  const count = data.event_count;
  const model = {
    count,
    kinds: data.kinds,
    tensors: data.tensors.map((row, index) => ({
      index, nbytes: row[0], kind: row[1], label: data.names[row[2]], birth: row[3],
      death: row[4] < 0 ? count : row[4], freed: row[4] >= 0,
      step: data.first_step + row[5],
      maker: row[6] < 0 ? null : data.op_names[row[6]], uploaded: row[7] === 1,
      lastUse: row[8], stack: row[9] < 0 ? [] : data.stacks[row[9]],
    })),
    change: new Int32Array(count),      // i + 1: tensor i is born; -(i + 1): it is freed
    foldedKind: new Int8Array(count),
    folded: new Float64Array(count),    // what small tensors of that kind grow by
    workspace: new Float64Array(count),
    op: new Int32Array(count).fill(-1), // the operation that runs there, or next
    start: new Float64Array(count),     // microseconds of host time before each event
    total: new Float64Array(count),
    seconds: 0,
  };
  for (const tensor of model.tensors) {
    model.change[tensor.birth] = tensor.index + 1;
    if (tensor.freed) model.change[tensor.death] = -(tensor.index + 1);
  }
  triples(data.folded, (event, kind, nbytes) => {
    model.foldedKind[event] = kind;
    model.folded[event] = nbytes;
  });
  const micros = new Float64Array(count);
  triples(data.ops, (event, name, time) => {
    model.op[event] = name;
    micros[event] = time;
  });
  for (let at = 0; at < data.workspace.length; at += 2) {
    model.workspace[data.workspace[at]] = data.workspace[at + 1];
  }
  let live = 0, time = 0;
  for (let event = 0; event < count; event++) {
    const which = model.change[event];
    if (which) live += Math.sign(which) * model.tensors[Math.abs(which) - 1].nbytes;
    live += model.folded[event];
    model.total[event] = live + model.workspace[event];
    model.start[event] = time;
    time += micros[event];
  }
  model.seconds = time / 1e6;
  for (let event = count - 2; event >= 0; event--) {
    if (model.op[event] < 0) model.op[event] = model.op[event + 1];
  }
  return model;
}

function triples(flat, visit) {
  let event = 0;
  for (let at = 0; at < flat.length; at += 3) {
    event += flat[at];
    visit(event, flat[at + 1], flat[at + 2]);
  }
}

// The stack of bands, followed event by event. What small tensors of a kind hold has the id
// -1 - kind, workspace that of the last kind.
class Walk {
  constructor(model) {
    this.model = model;
    this.alive = [];
    this.small = new Float64Array(model.kinds.length);
    this.event = -1;
  }

  to(event) {
    const { change, folded, foldedKind } = this.model;
    while (this.event < event) {
      const at = ++this.event, which = change[at];
      if (which > 0) this.alive.splice(this.place(which - 1), 0, which - 1);
      else if (which < 0) this.alive.splice(this.place(-which - 1), 1);
      if (folded[at]) this.small[foldedKind[at]] += folded[at];
    }
  }

  place(index) {
    let low = 0, high = this.alive.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.alive[middle] < index) low = middle + 1; else high = middle;
    }
    return low;
  }

  // Calls visit(id, kind, from, to) for each band, from the bottom up; true from it ends the walk.
  bands(visit) {
    const { tensors, kinds, workspace } = this.model;
    let y = 0, at = 0;
    for (let kind = 0; kind < kinds.length; kind++) {
      for (; at < this.alive.length && tensors[this.alive[at]].kind === kind; at++) {
        const top = y + tensors[this.alive[at]].nbytes;
        if (visit(this.alive[at], kind, y, top)) return;
        y = top;
      }
      const small = kind === kinds.length - 1 ? workspace[this.event] : this.small[kind];
      if (small > 0) {
        if (visit(-1 - kind, kind, y, y + small)) return;
        y += small;
      }
    }
  }
}

// The event that each column of pixels stands for: of those that fall in it the one with the
// most bytes, so that no peak is lost; where none does, the last before it.
function columnEvents(model, view, width) {
  const events = new Int32Array(width), span = view.high - view.low;
  let next = firstFrom(model, view, view.low), last = Math.max(0, next - 1);
  for (let column = 0; column < width; column++) {
    const edge = view.low + span * (column + 1) / width;
    let best = -1;
    for (; next < model.count && position(model, view, next) < edge; next++) {
      if (best < 0 || model.total[next] > model.total[best]) best = next;
      last = next;
    }
    events[column] = best < 0 ? last : best;
  }
  return events;
}

function position(model, view, event) {
  return view.byTime ? model.start[event] : event;
}

function firstFrom(model, view, low) {
  let first = 0, last = model.count;
  while (first < last) {
    const middle = (first + last) >> 1;
    if (position(model, view, middle) < low) first = middle + 1; else last = middle;
  }
  return first;
}

function extent(model, view) {
  return view.byTime ? Math.max(1, model.seconds * 1e6) : Math.max(1, model.count);
}
