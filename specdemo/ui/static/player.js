// Time, for a race that is over: one moment of engine time that all lanes show, moved by playing, stepping from round to
// round of the lane that the race is about, or by hand.
(function (specdemo) {
  "use strict";
  const { make, draw, text, show } = specdemo;

  const BY_ROUND = "round"; // one round a second
  const SPEEDS = [BY_ROUND, "0.05", "0.1", "0.25", "0.5", "1", "2"];
  const ROUND_MS = 1000;
  const FIRST_SHOW_S = 6; // a race shown unasked is slowed down until it lasts about this long
  const STEPS = 1000; // of the slider

  class Player {
    // onTime(t): draw the race as it was at t. onPlay(playing): it began, or came to rest.
    constructor(onTime, onPlay) {
      this.onTime = onTime;
      this.onPlay = onPlay;
      this.t = 0;
      this.playing = null;
      this.build();
      this.load(new specdemo.Story(2));
    }

    build() {
      const button = (name, shape, act) => {
        const element = make("button",
          { type: "button", class: "sd-small-button sd-key", "data-key": name, title: text(`player_${name}`), "aria-label": text(`player_${name}`) },
          draw("svg", { viewBox: "0 0 16 16", class: "sd-icon", "aria-hidden": "true" }, draw("path", { d: shape })));
        element.addEventListener("click", act);
        return element;
      };
      this.back = button("back", "M11 3 5 8l6 5Z", () => this.step(-1));
      this.forth = button("forth", "M5 3l6 5-6 5Z", () => this.step(1));
      this.toggle = make("button", { type: "button", class: "sd-small-button sd-play" });
      this.toggle.addEventListener("click", () => (this.playing ? this.pause() : this.play()));
      this.slider = make("input", { type: "range", class: "sd-scrub", min: 0, max: STEPS, step: 1, "aria-label": text("player_scrub") });
      this.slider.addEventListener("input", () => {
        this.pause();
        this.seek((this.slider.value / STEPS) * this.story.duration);
      });
      this.slider.addEventListener("keydown", (event) => this.key(event));
      this.speed = make("select", { class: "sd-speed-choice", "aria-label": text("player_speed") },
        ...SPEEDS.map((value) => make("option", { value }, value === BY_ROUND ? text("player_by_round") : text("player_times", { speed: value }))));
      this.speed.value = "1";
      this.speed.addEventListener("change", () => this.playing && this.play());
      this.where = make("span", { class: "sd-where" });
      this.element = make("div", { class: "sd-player", role: "group", "aria-label": text("player") },
        this.toggle, this.back, this.forth, this.slider, this.where, this.speed);
      this.label();
    }

    load(story) {
      this.stop();
      this.story = story;
      this.t = story.duration;
      const able = story.lanes[story.subject].rounds.length > 0;
      for (const control of [this.back, this.forth, this.toggle, this.slider, this.speed]) control.disabled = !able;
      this.mark();
    }

    // From the beginning, at a speed by which a stranger can follow.
    introduce() {
      const fits = SPEEDS.slice(1).filter((speed) => Number(speed) <= 1 && this.story.duration / Number(speed) >= FIRST_SHOW_S);
      this.speed.value = fits.at(-1) ?? SPEEDS[1];
      this.seek(0);
      this.play();
    }

    // The race as it was: all lanes at once, at their true speeds.
    replay() {
      this.speed.value = "1";
      this.seek(0);
      this.play();
    }

    play() {
      this.stop();
      if (this.t >= this.story.duration) this.seek(0);
      const from = this.t;
      const began = performance.now();
      const byRound = this.speed.value === BY_ROUND;
      let steps = 0;
      const frame = () => {
        const elapsed = performance.now() - began;
        if (!byRound) this.seek(from + (elapsed / 1000) * Number(this.speed.value));
        else for (; steps < Math.floor(elapsed / ROUND_MS); steps++) this.seek(this.next(1));
        if (this.t >= this.story.duration) this.pause();
        else this.playing = requestAnimationFrame(frame);
      };
      this.playing = requestAnimationFrame(frame);
      this.label();
      this.onPlay(true);
    }

    pause() {
      if (this.playing === null) return;
      this.stop();
      this.onPlay(false);
    }

    stop() {
      if (this.playing !== null) cancelAnimationFrame(this.playing);
      this.playing = null;
      this.label();
    }

    finish() {
      this.pause();
      this.seek(this.story.duration);
    }

    step(direction) {
      this.pause();
      this.seek(this.next(direction));
    }

    // When the next round of the race's own lane, or the one before, was over.
    next(direction) {
      const { subject } = this.story;
      const { rounds } = this.story.lanes[subject];
      const now = this.story.roundAt(subject, this.t);
      if (direction > 0) return now + 1 < rounds.length ? rounds[now + 1].t : this.story.duration;
      const past = now >= 0 && this.t > rounds[now].t ? now : now - 1;
      return past >= 0 ? rounds[past].t : 0;
    }

    seek(t) {
      this.t = Math.min(Math.max(0, t), this.story.duration);
      this.mark();
      this.onTime(this.t);
    }

    key(event) {
      const direction = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (!direction || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      this.step(direction);
    }

    mark() {
      const { duration, subject } = this.story;
      const { rounds } = this.story.lanes[subject];
      const place = rounds.length
        ? text("player_where", {
            n: rounds[Math.max(0, this.story.roundAt(subject, this.t))].n,
            all: rounds.at(-1).n,
            time: show.seconds(this.t),
          })
        : "";
      this.slider.value = duration ? Math.round((this.t / duration) * STEPS) : 0;
      this.slider.setAttribute("aria-valuetext", place);
      this.where.textContent = place;
    }

    label() {
      if (this.toggle) this.toggle.textContent = text(this.playing === null ? "player_play" : "player_pause");
    }
  }

  specdemo.Player = Player;
})(window.specdemo);
