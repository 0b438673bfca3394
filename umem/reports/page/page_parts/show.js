// Sizes and times for people, and elements made of text: names are never read as HTML.

function bytes(nbytes) {
  const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  for (const [unit, factor] of units) {
    if (Math.abs(nbytes) >= factor) return (nbytes / factor).toFixed(1) + " " + unit;
  }
  return Math.round(nbytes) + " B";
}

function seconds(value) {
  if (value === null) return "-";
  if (value === 0) return "0 s";
  if (value < 999.95e-6) return (value * 1e6).toFixed(1) + " us";
  if (value < 0.99995) return (value * 1e3).toFixed(1) + " ms";
  return value < 120 ? value.toFixed(1) + " s" : Math.round(value / 60) + " min";
}

function percent(share) {
  return share < 9.995 ? (100 * share).toFixed(1) + "%" : share.toFixed(0) + " times";
}

function number(value) {
  return value.toLocaleString("en-US");
}

function counted(value, what) {
  return number(value) + " " + what + (value === 1 ? "" : "s");
}

// What cannot be seen or would turn the text around is shown as its code.
function printable(text) {
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g,
    (char) => "\\u" + char.charCodeAt(0).toString(16).padStart(4, "0"));
}

function make(tag, className, ...parts) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const part of parts) {
    element.append(typeof part === "string" ? printable(part) : part);
  }
  return element;
}

// A line of code: its number is never broken.
function codeLine(className, line) {
  const [, file, number, more] = /^(.*)(:\d+)( .*)?$/.exec(line) ?? [null, line, "", ""];
  return make("div", className, file, make("span", "whole", number), more ?? "");
}

function byId(id) {
  return document.getElementById(id);
}

function swatch(kind) {
  const box = make("span", "swatch");
  box.style.background = "var(--k" + kind + ")";
  return box;
}
