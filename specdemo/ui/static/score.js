// The big numbers: each lane's speed, how far it is, and the speedup over the first.
(function (specdemo) {
  "use strict";
  const { make, text, show } = specdemo;

  class Score {
    constructor(lanes) {
      this.budget = 0;
      this.value = make("span", { class: "sd-ratio-value" });
      this.word = make("span", { class: "sd-ratio-word" });
      // the form's own Stop may be out of sight
      const stop = make("button", { class: "sd-small-button sd-stop", type: "button" }, text("stop"));
      stop.addEventListener("click", () => document.querySelector("#stop-button").click());
      this.second = make("span", { class: "sd-ratio-second" });
      this.middle = make("div", { class: "sd-ratio" }, this.value, this.word, this.second, stop);
      this.sides = lanes.map((lane) => this.side(lane));
      this.element = make("div", { class: "sd-scores" }, ...this.sides, this.middle);
      this.ratio(null);
    }

    // there: for each lane whether it has a place in this race. The ratio stands before the last.
    arrange(there) {
      this.sides.forEach((side, index) => (side.hidden = !there[index]));
      this.sides[there.lastIndexOf(true)].before(this.middle);
      this.element.dataset.lanes = there.filter(Boolean).length;
    }

    side(lane) {
      const speed = make("span", { class: "sd-speed-value" }, show.speed(null));
      const track = make("span", { class: "sd-track-fill" });
      lane.onSpeed = (record) => {
        speed.textContent = show.speed(record.tps);
        const share = this.budget ? (record.tokens ?? 0) / this.budget : 0;
        track.style.transform = `scaleX(${Math.min(1, share)})`;
      };
      return make("div", { class: `sd-score sd-score-${lane.name}`, "data-score": lane.name },
        make("span", { class: "sd-score-name" }, text(`lane_${lane.name}`)),
        make("span", { class: "sd-speed" }, speed, make("span", { class: "sd-unit" }, text("tps_unit"))),
        make("span", { class: "sd-track", "aria-hidden": "true" }, track));
    }

    // value: over standard decoding; second: over plain speculative decoding, where that runs beside.
    ratio(value, second = null) {
      const word = value === null ? "waiting" : value > 1 ? "faster" : value < 1 ? "slower" : "equal";
      this.value.textContent = show.ratio(value);
      this.word.textContent = text(`ratio_${word}`);
      this.middle.dataset.ratio = word;
      this.second.dataset.ratio = second !== null && second < 1 ? "slower" : "faster";
      this.second.textContent = second === null ? "" : text("ratio_second", { ratio: show.ratio(second) });
    }
  }

  specdemo.Score = Score;
})(window.specdemo);
