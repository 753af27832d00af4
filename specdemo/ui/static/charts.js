// Small charts: axes, lines, bars, points. They draw what the log says; each has a sentence that says it in words.
(function (specdemo) {
  "use strict";
  const { make, draw } = specdemo;

  const WIDTH = 360;
  const WIDE = 760; // the one that shows a whole race, where there is room
  const ROOM = "(min-width: 1010px)"; // as in the style
  const HEIGHT = 210;
  const EDGE = { left: 40, right: 12, top: 12, bottom: 38 };
  const NICE = [1, 2, 2.5, 5, 10];

  // Round figures from 0 to at least `most`.
  const niceTicks = (most, count) => {
    const rough = most / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * NICE.find((nice) => nice * power >= rough * 0.999);
    return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => Number((i * step).toPrecision(6)));
  };

  class Chart {
    // spoken: what the picture shows, in a sentence; x, y: {most, label, ticks, name(tick)}
    constructor(title, about, spoken, x, y, wide = false) {
      const width = wide && matchMedia(ROOM).matches ? WIDE : WIDTH;
      this.width = width;
      this.x = (value) => EDGE.left + (value / x.most) * (width - EDGE.left - EDGE.right);
      this.y = (value) => HEIGHT - EDGE.bottom - (value / y.most) * (HEIGHT - EDGE.top - EDGE.bottom);
      this.svg = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, class: "sd-chart-svg", role: "img", "aria-label": spoken });
      this.element = make("figure", { class: `sd-card sd-chart${wide ? " sd-chart-wide" : ""}` },
        make("figcaption", {}, make("h3", {}, title), make("p", {}, about)), this.svg);
      const label = (value, axis) => (axis.name ? axis.name(value) : String(value));
      for (const tick of y.ticks ?? niceTicks(y.most, 4)) {
        this.put("line", { class: "sd-grid-line", x1: EDGE.left, x2: width - EDGE.right, y1: this.y(tick), y2: this.y(tick) });
        this.put("text", { class: "sd-axis-text", x: EDGE.left - 6, y: this.y(tick) + 4, "text-anchor": "end" }, label(tick, y));
      }
      for (const tick of x.ticks ?? niceTicks(x.most, 5)) {
        this.put("text", { class: "sd-axis-text", x: this.x(tick), y: HEIGHT - EDGE.bottom + 16, "text-anchor": "middle" }, label(tick, x));
      }
      this.put("text", { class: "sd-axis-name", x: width - EDGE.right, y: HEIGHT - 5, "text-anchor": "end" }, x.label);
    }

    put(tag, attributes, ...children) {
      const element = draw(tag, attributes, ...children);
      this.svg.append(element);
      return element;
    }

    line(points, kind) {
      this.put("path", { class: `sd-line sd-line-${kind}`, d: points.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(2)} ${this.y(y).toFixed(2)}`).join("") });
    }

    level(value, kind) {
      this.put("line", { class: `sd-line sd-line-${kind}`, x1: EDGE.left, x2: this.width - EDGE.right, y1: this.y(value), y2: this.y(value) });
    }

    bar(x, width, value, kind, name) {
      const top = this.y(value);
      this.put("rect", { class: `sd-column sd-column-${kind}`, x: this.x(x - width / 2), width: this.x(x + width / 2) - this.x(x - width / 2), y: top, height: this.y(0) - top, rx: 2 });
      if (name) this.put("text", { class: "sd-column-text", x: this.x(x), y: top - 4, "text-anchor": "middle" }, name);
    }

    point(x, y, kind, name, side = "start") {
      this.put("circle", { class: `sd-point sd-point-${kind}`, cx: this.x(x), cy: this.y(y), r: 5 });
      if (name) this.put("text", { class: "sd-point-text", x: this.x(x) + (side === "start" ? 9 : -9), y: this.y(y) - 8, "text-anchor": side }, name);
    }
  }

  // A scale that holds `most`, with a little air above it.
  const scale = (most) => {
    const ticks = niceTicks((most || 1) * 1.15, 4);
    return { most: (most || 1) * 1.15, ticks };
  };

  Object.assign(specdemo, { Chart, scale });
})(window.specdemo);
