// The timeline: bands as pixels, axes and marks above them, and what the pointer does.

const GUTTER = 62, STRIP = 16, BOTTOM = 24, TOP = 20;

class Chart {
  constructor(model, data, onHover) {
    Object.assign(this, { model, data, onHover });
    this.box = byId("chart");
    this.image = byId("bands");
    this.over = byId("over");
    this.map = byId("map");
    this.view = { low: 0, high: extent(model, {}), byTime: false, fit: false };
    this.chosen = null;   // an id that stays in sight
    this.pointed = null;  // the id under the pointer
    this.drag = null;
    new ResizeObserver(() => this.draw()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // -- the view --

  show(low, high) {
    const whole = extent(this.model, this.view), least = whole * Math.min(1, 8 / this.model.count);
    const span = Math.min(whole, Math.max(least, high - low));
    const middle = (low + high) / 2;
    this.view.low = Math.min(Math.max(0, middle - span / 2), whole - span);
    this.view.high = this.view.low + span;
    this.draw();
  }

  zoom(factor, at = 0.5) {
    const { low, high } = this.view, fixed = low + (high - low) * at;
    this.show(fixed - (fixed - low) * factor, fixed + (high - fixed) * factor);
  }

  move(share) {
    const step = (this.view.high - this.view.low) * share;
    this.show(this.view.low + step, this.view.high + step);
  }

  around(first, last) {
    const low = position(this.model, this.view, first);
    const end = Math.min(last, this.model.count - 1);
    const margin = Math.max((position(this.model, this.view, end) - low) * 0.15, 4);
    this.show(low - margin, position(this.model, this.view, end) + margin);
  }

  all() {
    this.show(0, extent(this.model, this.view));
  }

  peak() {
    const width = Math.max(20, this.model.count / 25), at = this.data.peak.event;
    this.around(Math.max(0, Math.floor(at - width / 2)), Math.ceil(at + width / 2));
  }

  byTime(on) {
    const { low, high } = this.view, first = firstFrom(this.model, this.view, low);
    const last = Math.min(this.model.count - 1, firstFrom(this.model, this.view, high));
    const whole = high - low >= extent(this.model, this.view);
    this.view.byTime = on;
    if (whole) this.all();
    else this.show(position(this.model, this.view, first), position(this.model, this.view, last));
  }

  // -- drawing --

  draw() {
    const ratio = window.devicePixelRatio || 1, rect = this.box.getBoundingClientRect();
    if (rect.width < GUTTER + 10) return;
    this.ratio = ratio;
    this.width = Math.max(1, Math.floor((rect.width - GUTTER) * ratio));
    this.height = Math.max(1, Math.floor((rect.height - TOP - STRIP - BOTTOM) * ratio));
    this.size = { width: rect.width, height: rect.height };
    place(this.image, GUTTER, TOP, this.width, this.height, ratio);
    place(this.over, 0, 0, Math.floor(rect.width * ratio), Math.floor(rect.height * ratio), ratio);
    this.events = columnEvents(this.model, this.view, this.width);
    this.top = this.scaleTop();
    this.ink = inks(this.model);
    Object.assign(this.box.dataset, { low: this.view.low, high: this.view.high, top: this.top });
    this.drawBands();
    this.drawOver();
    drawMap(this);
  }

  scaleTop() {
    const peak = this.data.peak.peak_bytes, vram = this.data.vram;
    let high = peak;
    if (this.view.fit) high = this.events.reduce((m, e) => Math.max(m, this.model.total[e]), 0);
    else if (vram && vram.vram_bytes < 2 * peak) high = Math.max(high, vram.vram_bytes);
    return Math.max(1, high) * 1.04;
  }

  drawBands() {
    const { width, height } = this, context = this.image.getContext("2d");
    const picture = context.createImageData(width, height);
    const pixels = new Uint32Array(picture.data.buffer), walk = new Walk(this.model);
    const scale = height / this.top, { tensors } = this.ink;
    for (let column = 0; column < width; column++) {
      walk.to(this.events[column]);
      let below = height;
      walk.bands((id, kind, from, to) => {
        const above = Math.max(0, height - Math.round(to * scale));
        if (above >= below) return above <= 0;
        const color = id < 0 ? this.ink.kinds[kind] : tensors[id];
        for (let row = above; row < below; row++) pixels[row * width + column] = color;
        if (below - above > 3 * this.ratio) {
          pixels[above * width + column] = this.ink.edges[kind];
        }
        below = above;
        return above <= 0;
      });
    }
    context.putImageData(picture, 0, 0);
  }

  drawOver() {
    const context = this.over.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.size.width, this.size.height);
    drawAxes(this, context);
    const marked = this.pointed ?? this.chosen;
    if (marked !== null && marked >= 0) drawOutline(this, context, marked);
    if (this.drag && this.drag.moved) drawSelection(this, context);
  }

  x(at) {
    const { low, high } = this.view;
    return GUTTER + (at - low) / (high - low) * (this.width / this.ratio);
  }

  y(nbytes) {
    return TOP + (1 - nbytes / this.top) * (this.height / this.ratio);
  }

  // -- what is where --

  // The event and the band at a place of the chart, in CSS pixels; the band is null above them.
  at(x, y) {
    const column = Math.floor((x - GUTTER) * this.ratio);
    if (!this.model.count || column < 0 || column >= this.width) return null;
    const level = (1 - (y - TOP) * this.ratio / this.height) * this.top;
    const event = this.events[column], walk = new Walk(this.model);
    walk.to(event);
    let found = null;
    walk.bands((id, kind, from, to) => {
      if (level >= from && level < to) found = { id, kind, nbytes: to - from };
      return found !== null;
    });
    return { event, band: found };
  }
}

function place(canvas, left, top, width, height, ratio) {
  canvas.width = width;
  canvas.height = height;
  Object.assign(canvas.style, {
    left: left + "px", top: top + "px", width: width / ratio + "px", height: height / ratio + "px",
  });
}

// -- colours ------------------------------------------------------------------------------------

function inks(model) {
  const style = getComputedStyle(document.documentElement);
  const kinds = model.kinds.map((_, kind) => rgb(style.getPropertyValue("--k" + kind)));
  const shade = (color, by) => packed(color.map((part) => Math.min(255, Math.max(0, part * by))));
  return {
    css: (name) => style.getPropertyValue("--" + name).trim(),
    kinds: kinds.map((color) => shade(color, 0.85)),
    edges: kinds.map((color) => shade(color, 0.72)),
    tensors: model.tensors.map((t) => shade(kinds[t.kind], 0.88 + 0.26 * (t.birth * 0.618034 % 1))),
  };
}

function rgb(hex) {
  const text = hex.trim();
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

function packed([red, green, blue]) {
  return (255 << 24 | Math.round(blue) << 16 | Math.round(green) << 8 | Math.round(red)) >>> 0;
}
