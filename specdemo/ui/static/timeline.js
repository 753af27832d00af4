// Where the time went: all lanes on one axis of engine time, each round with its measured phases. A phase of a whole
// lane is a single path whose unit is the second, so zooming only moves the view.
(function (specdemo) {
  "use strict";
  const { make, draw, text, show } = specdemo;

  const LANES = ["standard", "speculative", "ssd"];
  const SSD = 2;
  const PHASES = ["draft", "verify", "judge", "rest"]; // as in a record's `s`, and what is left of the round
  const HIDDEN = "hidden"; // drafting while the target verifies
  const WHOLE = [0, 1]; // a row from top to bottom
  const TARGET = [0, 0.46]; // where two work at once: the target's track, and the drafter's
  const DRAFTER = [0.54, 1];
  const CLOSEST = 400; // times the whole
  const TICKS = [1, 2, 5];
  const LABEL_PX = 90;

  class Timeline {
    // seek(t): somebody points at a moment.
    constructor(seek) {
      this.seek = seek;
      this.view = { from: 0, span: 1 };
      this.length = 1;
      this.now = 0;
      this.build();
    }

    build() {
      this.rows = LANES.map((name) => {
        const picture = draw("svg", { class: "sd-time-svg", preserveAspectRatio: "none", "aria-hidden": "true" });
        const label = make("div", { class: `sd-time-name sd-time-${name}` }, text(`lane_short_${name}`));
        return { picture, label, element: make("div", { class: `sd-time-row sd-time-${name}`, "data-time": name }, picture) };
      });
      this.rows[SSD].label.replaceChildren(...["timeline_target", "timeline_drafter"].map((track) => make("small", {}, text(track))));
      this.head = make("div", { class: "sd-time-head", "aria-hidden": "true" });
      this.axis = make("div", { class: "sd-time-axis", "aria-hidden": "true" });
      this.strip = make("div", { class: "sd-time-strip", tabindex: "0", role: "group", "aria-label": text("timeline_about") },
        ...this.rows.map((row) => row.element), this.axis, this.head);
      this.detail = make("p", { class: "sd-time-detail" });
      const button = (name, sign, act) => {
        const element = make("button", { type: "button", class: "sd-small-button sd-key", "data-zoom": name, "aria-label": text(`zoom_${name}`), title: text(`zoom_${name}`) }, sign);
        element.addEventListener("click", act);
        return element;
      };
      const entry = (phase) => make("li", {}, make("span", { class: `sd-swatch sd-phase-${phase}`, "aria-hidden": "true" }), text(`phase_${phase}`));
      this.hiddenEntry = entry(HIDDEN);
      const legend = make("ul", { class: "sd-time-legend" }, ...PHASES.map(entry), this.hiddenEntry);
      this.element = make("section", { class: "sd-card sd-timeline" },
        make("header", { class: "sd-card-head" },
          make("h3", {}, text("timeline_title")), legend,
          make("div", { class: "sd-zoom", role: "group", "aria-label": text("zoom") },
            button("out", "−", () => this.zoom(0.5)), button("in", "+", () => this.zoom(2)), button("all", "⤢", () => this.look(0, this.length)))),
        make("div", { class: "sd-time-body" },
          make("div", { class: "sd-time-names" }, ...this.rows.map((row) => row.label)),
          this.strip),
        this.detail);
      this.listen();
    }

    listen() {
      const strip = this.strip;
      let grip = null;
      strip.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        grip = { x: event.clientX, from: this.view.from, moved: false };
        strip.setPointerCapture(event.pointerId);
      });
      strip.addEventListener("pointermove", (event) => {
        if (!grip) {
          this.point(this.timeOf(event), this.rowOf(event));
          return;
        }
        const shift = event.clientX - grip.x;
        grip.moved ||= Math.abs(shift) > 4;
        if (grip.moved) this.look(grip.from - (shift / strip.clientWidth) * this.view.span, this.view.span);
      });
      strip.addEventListener("pointerup", (event) => {
        if (grip && !grip.moved) this.seek(this.timeOf(event));
        grip = null;
      });
      strip.addEventListener("pointercancel", () => (grip = null));
      strip.addEventListener("pointerleave", () => this.at(this.now));
      strip.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return; // else the wheel is the page's
        event.preventDefault();
        this.zoom(Math.exp(-event.deltaY / 200), this.timeOf(event));
      }, { passive: false });
      strip.addEventListener("keydown", (event) => {
        const act = {
          "+": () => this.zoom(2), "=": () => this.zoom(2), "-": () => this.zoom(0.5), 0: () => this.look(0, this.length),
          ArrowLeft: () => this.look(this.view.from - this.view.span / 8, this.view.span),
          ArrowRight: () => this.look(this.view.from + this.view.span / 8, this.view.span),
        }[event.key];
        if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        act();
      });
    }

    timeOf(event) {
      const box = this.strip.getBoundingClientRect();
      return this.view.from + ((event.clientX - box.left) / box.width) * this.view.span;
    }

    rowOf(event) {
      const shown = this.rows.filter((row) => !row.element.hidden);
      const under = shown.findLast((row) => event.clientY >= row.element.getBoundingClientRect().top) ?? shown[0];
      return this.rows.indexOf(under);
    }

    show(story) {
      this.story = story;
      this.length = story.duration || 1;
      story.lanes.forEach((lane, index) => {
        const row = this.rows[index];
        row.element.hidden = row.label.hidden = !lane.records.length;
        row.picture.replaceChildren(...this.bars(lane, index === SSD));
      });
      this.hiddenEntry.hidden = !story.lanes[SSD].records.length;
      const told = story.lanes.map((lane, index) => lane.records.length &&
        text("timeline_lane", { lane: text(`lane_${LANES[index]}`), rounds: Math.max(0, lane.rounds.length - 1), time: show.seconds(lane.rounds.at(-1)?.t) }));
      this.strip.setAttribute("aria-label", [text("timeline_about"), ...told.filter(Boolean)].join(" "));
      this.look(0, this.length);
    }

    // A lane's phases as paths, two for each so that neighbouring rounds can be told apart. two: target and drafter each
    // have a track, since they work at the same time.
    bars(lane, two) {
      const paths = Object.fromEntries([...PHASES, HIDDEN].map((phase) => [phase, ["", ""]]));
      lane.rounds.forEach((round, number) => {
        const bar = (phase, from, until, [top, bottom]) => {
          if (until > from) paths[phase][number % 2] += `M${from} ${top}H${until}V${bottom}H${from}Z`;
        };
        let at = round.from;
        [...round.s, Infinity].forEach((seconds, phase) => {
          const until = Math.min(round.t, at + seconds);
          bar(PHASES[phase], at, until, two ? (PHASES[phase] === "draft" ? DRAFTER : TARGET) : WHOLE);
          at = Math.max(at, until);
        });
        if (!round.cache || round.cache.p === "none") return; // what does not run beside the target is in the draft
        const begin = round.from + round.s[0];
        const [built, known] = round.cache.b;
        const hidden = Math.min(built, known);
        bar(HIDDEN, begin, begin + hidden, DRAFTER);
        bar("draft", begin + hidden, begin + built, DRAFTER);
      });
      return Object.entries(paths).flatMap(([phase, pair]) =>
        pair.map((d, odd) => draw("path", { d, class: `sd-phase-${phase}${odd ? " sd-odd" : ""}` })));
    }

    zoom(factor, around = this.inView(this.now) ? this.now : this.view.from + this.view.span / 2) {
      const span = Math.min(this.length, Math.max(this.length / CLOSEST, this.view.span / factor));
      this.look(around - ((around - this.view.from) * span) / this.view.span, span);
    }

    inView(t) {
      return t >= this.view.from && t <= this.view.from + this.view.span;
    }

    look(from, span) {
      this.view = { from: Math.min(Math.max(0, from), this.length - span), span };
      for (const row of this.rows) row.picture.setAttribute("viewBox", `${this.view.from} 0 ${span} 1`);
      this.ticks();
      this.at(this.now);
    }

    ticks() {
      const most = Math.max(2, Math.floor((this.strip.clientWidth || 600) / LABEL_PX));
      const power = 10 ** Math.floor(Math.log10(this.view.span / most));
      const step = power * (TICKS.find((tick) => this.view.span / (tick * power) <= most) ?? 10);
      const labels = [];
      for (let i = Math.ceil(this.view.from / step); i * step <= this.view.from + this.view.span * 1.0001; i++) {
        const place = ((i * step - this.view.from) / this.view.span) * 100;
        labels.push(make("span", { class: "sd-tick", style: `left: ${place}%` }, i === 0 ? "0" : this.time(i * step, step)));
      }
      this.axis.replaceChildren(...labels);
    }

    time(t, step) {
      if (step >= 0.1) return `${t.toFixed(step < 1 ? 1 : 0)} s`;
      return `${(1000 * t).toFixed(step < 0.001 ? 1 : 0)} ms`;
    }

    // The moment that the lanes show.
    at(t) {
      this.now = t;
      this.head.hidden = !this.inView(t);
      this.head.style.left = `${((t - this.view.from) / this.view.span) * 100}%`;
      const lane = this.story?.subject ?? 1;
      this.tell(lane, this.story ? Math.max(0, this.story.roundAt(lane, t)) : 0);
    }

    // Follow the moment while the race plays.
    follow(t) {
      if (!this.inView(t)) this.look(t - this.view.span / 8, this.view.span);
      this.at(t);
    }

    // The round that was going on at t.
    point(t, lane) {
      const { rounds } = this.story.lanes[lane];
      this.tell(lane, Math.min(this.story.roundAt(lane, t) + 1, rounds.length - 1));
    }

    tell(lane, index) {
      const rounds = this.story?.lanes[lane].rounds ?? [];
      const round = rounds[index];
      if (!round) {
        this.detail.textContent = "";
        return;
      }
      const parts = round.s.map((seconds, phase) => (seconds > 0 ? `${text(`phase_${PHASES[phase]}`)} ${show.seconds(seconds)}` : null)).filter(Boolean);
      if (round.cache) parts.push(text("timeline_cache", { time: show.seconds(round.cache.b[0]), hidden: show.percent(round.cache.d) }));
      const name = round.n ? text("timeline_round", { n: round.n }) : text("round_title_first");
      this.detail.textContent = `${text(`lane_short_${LANES[lane]}`)}, ${name}: ${parts.length ? `${parts.join(", ")}; ` : ""}${text("timeline_tokens", { n: round.c - (rounds[index - 1]?.c ?? 0) })}`;
    }
  }

  specdemo.Timeline = Timeline;
})(window.specdemo);
