// What every part of the page's script shares: its text, making elements, showing numbers.
// Model and prompt text reaches the document only through textContent.
window.specdemo = window.specdemo || {};

(function (specdemo) {
  "use strict";

  // text("same_final", {n: 12}) -> the sentence with its blanks filled
  specdemo.text = (key, blanks = {}) => {
    const sentence = specdemo.strings[key] ?? key;
    return sentence.replace(/\{(\w+)\}/g, (whole, name) => (name in blanks ? String(blanks[name]) : whole));
  };

  // make("span", {class: "x", title: "y"}, "text", child, ...) -> element
  specdemo.make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  };

  // The same for a drawing.
  specdemo.draw = (tag, attributes = {}, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  // A token as one can see it: blanks and line ends by their signs.
  specdemo.visible = (string) =>
    string === "" ? specdemo.text("token_part") : string.replace(/\r\n|\n|\r/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (blanks) => "␣".repeat(blanks.length));

  specdemo.calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  const none = () => specdemo.text("none");

  // Formatting only: every figure comes from the log as it is.
  specdemo.show = {
    speed: (value) => (value === null || value === undefined ? none() : value.toFixed(value < 100 ? 1 : 0)),
    ratio: (value) => (value === null || value === undefined ? none() : `${value.toFixed(2)}×`),
    count: (value) => (value === null || value === undefined ? none() : String(value)),
    share: (value) => (value === null || value === undefined ? none() : `${(100 * value).toFixed(0)} %`),
    decimal: (value) => (value === null || value === undefined ? none() : value.toFixed(2)),
    probability: (value) => {
      if (value === null || value === undefined) return none();
      if (value === 0 || value === 1) return String(value);
      return value < 0.0005 ? "< 0.001" : value > 0.9995 ? "> 0.999" : value.toFixed(3);
    },
    percent: (value) => {
      if (value === null || value === undefined) return none();
      return value > 0 && value < 0.005 ? "< 1 %" : `${(100 * value).toFixed(0)} %`;
    },
    seconds: (value) => {
      if (value === null || value === undefined) return none();
      if (value < 0.01) return `${(1000 * value).toFixed(1)} ms`;
      return value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
    },
  };

  // What the page is doing, for its style and its buttons: "idle", "waiting", "running".
  specdemo.setState = (state) => {
    document.body.dataset.race = state;
    const race = document.querySelector("#race-button");
    const stop = document.querySelector("#stop-button");
    if (race) race.disabled = state !== "idle";
    if (stop) stop.disabled = state === "idle";
    if (specdemo.stage) specdemo.stage.element.dataset.race = state;
  };

  specdemo.copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // pages served over plain http have no clipboard: the old way
      const area = specdemo.make("textarea", { "aria-hidden": "true", style: "position:fixed;opacity:0" });
      area.value = text;
      document.body.append(area);
      area.select();
      try {
        return document.execCommand("copy");
      } finally {
        area.remove();
      }
    }
  };
})(window.specdemo);
