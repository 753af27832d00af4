// The race: reads the log as it grows, hands each record to its lane, and, once the race is over, lets its parts look at
// it from any moment.
(function (specdemo) {
  "use strict";
  const { make, text, show, Lane, Story } = specdemo;

  const LANES = ["standard", "speculative", "ssd"]; // the last one only where SSD runs, beside what it has to beat
  const DRAWN = new Set(["lane", "first", "piece", "retold", "round", "why", "cache", "numbers", "ratio", "same", "twin", "end", "failed"]);
  const LEGEND = ["accepted", "rejected", "discarded", "recovered", "bonus", "clipped", "plain"];

  class Stage {
    // raceWith(prompt, draftLength): ask for another race; null where there is no server.
    constructor(root, raceWith) {
      this.lanes = LANES.map((name) => new Lane(name));
      this.story = new Story(LANES.length); // of the race on show
      this.drawn = LANES.map(() => 0); // how many of a lane's records are drawn
      this.log = { head: null, read: 0 };
      this.closing = new AbortController();
      this.build(root, raceWith);
      this.same.show(null);
    }

    build(root, raceWith) {
      this.score = new specdemo.Score(this.lanes);
      this.same = new specdemo.Same("same");
      this.twin = new specdemo.Same("twin"); // SSD and speculative decoding, where both draw alike
      this.why = new specdemo.Why(this.lanes, () => this.story, this.closing.signal);
      this.player = new specdemo.Player((t) => this.at(t), (playing) => this.playing(playing));
      this.round = new specdemo.RoundPicture((round, place, box) => this.askWhy(round, place, box));
      const seek = (t) => {
        this.player.pause();
        this.player.seek(t);
      };
      this.cache = new specdemo.CacheTree(seek);
      this.timeline = new specdemo.Timeline(seek);
      this.lessons = new specdemo.Lessons(raceWith && ((draftLength) => raceWith(this.story.prompt, draftLength)));
      this.clockNote = make("p", { class: "sd-clock-note" }, text("clock_note"));
      this.banner = make("div", { class: "sd-banner", hidden: true });
      this.recorded = make("div", { class: "sd-recorded", hidden: true });
      this.spoken = make("div", { class: "sd-spoken", role: "log", "aria-live": "polite" }); // for those who do not see the race
      this.replayButton = make("button", { class: "sd-small-button sd-replay", type: "button", disabled: true }, text("replay"));
      this.replayButton.addEventListener("click", () => (this.player.playing ? this.player.finish() : this.player.replay()));
      this.replayNote = make("span", { class: "sd-replay-note", hidden: true }, text("replay_note"));
      const onlyKept = make("input", { type: "checkbox", class: "sd-only-kept" });
      onlyKept.addEventListener("change", () => this.element.classList.toggle("sd-kept-only", onlyKept.checked));
      this.after = make("div", { class: "sd-after", hidden: true }, this.round.element, this.cache.element, this.timeline.element, this.lessons.element);
      this.element = make("div", { class: "sd-stage-inner" },
        this.banner,
        this.recorded,
        this.spoken,
        this.score.element,
        (this.lanesElement = make("div", { class: "sd-lanes" }, ...this.lanes.map((lane) => lane.element))),
        this.player.element,
        make("div", { class: "sd-under" },
          make("div", { class: "sd-verdicts" }, this.same.element, this.twin.element),
          make("div", { class: "sd-actions" }, this.replayNote, this.replayButton, new specdemo.Presenter(this.closing.signal).button)),
        make("div", { class: "sd-legend", role: "group", "aria-label": text("legend") },
          make("ul", {}, ...LEGEND.map((fate) => make("li", { title: text(`fate_${fate}_about`) },
            make("span", { class: `sd-token sd-${fate}` }, text(`fate_${fate}`)),
            make("span", { class: "sd-legend-about" }, text(`fate_${fate}_about`))))),
          make("div", { class: "sd-legend-side" },
            make("label", { class: "sd-switch" }, onlyKept, make("span", {}, text("only_kept"))),
            make("p", { class: "sd-fine" }, text("why_hint")))),
        this.after,
        this.clockNote,
        this.why.element,
        this.why.spoken);
      root.append(this.element);
      this.arrange();
    }

    // Which lanes there are is known once they have begun: two, unless others say so.
    arrange() {
      const there = this.story.lanes.map((lane, index) => lane.records.length > 0 || (index < 2 && this.story.subject < 2));
      this.lanes.forEach((lane, index) => (lane.element.hidden = !there[index]));
      this.lanesElement.dataset.lanes = there.filter(Boolean).length;
      this.score.arrange(there);
    }

    // Let go of the document: another stage takes this one's place.
    close() {
      this.player.stop();
      this.closing.abort();
    }

    // The log as it is now: a longer one of the same race, or a new one.
    read(log) {
      const head = log.slice(0, log.indexOf("\n") + 1);
      if (!head) return;
      if (head !== this.log.head) this.log = { head, read: head.length };
      const end = log.lastIndexOf("\n") + 1;
      const lines = log.slice(this.log.read, end).split("\n");
      this.log.read = Math.max(this.log.read, end);
      let batch = [];
      for (const line of lines) {
        if (!line) continue;
        const record = JSON.parse(line);
        if (DRAWN.has(record.k)) {
          batch.push(record);
        } else {
          this.show(batch);
          batch = [];
          this.take(record);
        }
      }
      this.show(batch);
    }

    // Records that came while the race runs.
    show(records) {
      for (const record of records) this.story.add(record);
      const about = records.find((record) => record.k === "lane");
      if (about) this.clockNote.textContent = text(about.clock === "client" ? "clock_note_served" : "clock_note");
      if (records.some((record) => record.k === "lane")) this.arrange();
      this.lanes.forEach((lane, index) => {
        lane.draw(records.filter((record) => record.l === index));
        this.drawn[index] = this.story.lanes[index].records.length;
      });
      const latest = (kind) => records.filter((record) => record.k === kind).at(-1);
      const ratio = latest("ratio");
      if (ratio) this.score.ratio(ratio.v, ratio.w);
      for (const kind of ["same", "twin"]) {
        const verdict = latest(kind);
        if (verdict) this[kind].show(verdict);
      }
    }

    take(record) {
      switch (record.k) {
        case "wait":
          specdemo.setState("waiting");
          this.say(this.waitText(record), "wait");
          break;
        case "error":
          this.say(specdemo.said(record.message), "error");
          break;
        case "recorded":
          this.announced = record;
          break;
        case "race":
          this.begin(record);
          break;
        case "insight":
        case "ssd":
        case "projection":
          this.story.add(record);
          break;
        case "done":
          this.over(record.ok);
          break;
      }
    }

    begin(record) {
      this.story = new Story(LANES.length);
      this.story.add(record);
      this.tellRecorded();
      this.player.load(this.story);
      this.why.hide();
      this.after.hidden = true;
      this.score.budget = record.budget;
      this.same.greedy = record.greedy;
      this.drawn = LANES.map(() => 0);
      for (const lane of this.lanes) lane.clear();
      this.arrange();
      this.score.ratio(null);
      this.same.show(null);
      this.twin.show(null);
      for (const lane of this.lanes) lane.setState("waiting");
      this.say(null);
      this.replayButton.disabled = true;
      if (!this.story.recorded) {
        this.speak(text("spoken_begin"));
        specdemo.setState("running");
      }
    }

    // A race from before: what is shown is no race that runs.
    tellRecorded() {
      const record = this.announced;
      this.announced = null;
      if (record) this.story.add(record);
      this.recorded.hidden = !record;
      if (!record) return;
      const date = new Date(record.date).toLocaleDateString(document.documentElement.lang || undefined, { dateStyle: "medium" });
      this.recorded.replaceChildren(
        make("strong", {}, text("recorded_title")), " ", text("recorded_about", { ...record, date }),
        make("q", { class: "sd-recorded-prompt", dir: "auto" }, record.prompt));
    }

    // The log ended, or the stream did without a word.
    over(ok = false) {
      specdemo.setState("idle");
      const told = this.story.lanes.some((lane) => lane.rounds.length > 1);
      this.replayButton.disabled = !told;
      this.after.hidden = !told;
      if (!told) return;
      this.player.load(this.story);
      this.timeline.show(this.story);
      this.lessons.show(this.story);
      this.cache.load(this.story);
      this.round.clear();
      this.look(this.story.duration);
      if (this.story.recorded) this.introduce();
      else if (ok) this.speak(text("spoken_end", { ratio: this.score.value.textContent }));
    }

    // The recorded race plays once, unasked, unless the visitor wants no motion.
    introduce() {
      if (!specdemo.introduced && !specdemo.calm()) this.player.introduce();
      specdemo.introduced = true;
    }

    // The player moved to moment t.
    at(t) {
      this.lanes.forEach((lane, index) => {
        const { records } = this.story.lanes[index];
        const told = this.story.told(index, t);
        if (told < this.drawn[index]) {
          lane.rewind();
          this.drawn[index] = 0;
        }
        lane.draw(records.slice(this.drawn[index], told));
        this.drawn[index] = told;
      });
      this.look(t);
    }

    look(t) {
      this.round.show(this.story, t);
      this.cache.show(this.story, t);
      this.timeline.follow(t);
      this.why.place();
    }

    playing(playing) {
      this.replayNote.hidden = !playing;
      this.replayButton.textContent = text(playing ? "replay_skip" : "replay");
    }

    // The lanes may not have got that far yet: then they go there first.
    askWhy(round, place, box) {
      const told = this.story.round(1, round);
      if (told.t > this.player.t) this.player.seek(told.t);
      this.why.ask(round, place, box);
    }

    lost() {
      if (document.body.dataset.race === "idle") return;
      this.say(text("error_lost"), "error");
      this.over();
    }

    // Where the form fills the window, the race would start below its edge.
    comeIntoView() {
      const box = this.element.getBoundingClientRect();
      if (box.top > 0.6 * innerHeight || box.bottom < 0.4 * innerHeight) {
        this.element.scrollIntoView({ block: "start", behavior: specdemo.calm() ? "auto" : "smooth" });
      }
    }

    say(sentence, kind = "") {
      this.banner.hidden = !sentence;
      this.banner.className = `sd-banner sd-banner-${kind}`;
      this.banner.setAttribute("role", kind === "error" ? "alert" : "status");
      this.banner.textContent = sentence ?? "";
    }

    speak(sentence) {
      this.spoken.append(make("p", {}, sentence));
    }

    waitText(record) {
      if (record.why === "line") {
        const place = record.place > 1 ? text("wait_line", record) : text("wait_line_next");
        return record.seconds ? `${place} ${text("wait_line_seconds", record)}` : place;
      }
      return text(`wait_${record.why}`) + (record.message ? ` ${specdemo.said(record.message)}` : "");
    }
  }

  // In an element of its own: log() is the text so far, watch calls back when it has grown. pick: the form may take
  // what is in specdemo.picked, a prompt and a draft length; null where there is no form.
  specdemo.mountStage = (root, log, watch, pick = null) => {
    const raceWith = pick && ((...picked) => {
      specdemo.picked = picked;
      pick();
    });
    specdemo.stage?.close();
    const stage = new Stage(root, raceWith);
    specdemo.stage = stage;
    specdemo.setState("idle");
    stage.read(log() ?? "");
    watch("value", () => stage.read(log() ?? ""));
  };

  // While something is awaited: is there still a server? Gradio's stream can end without telling anyone.
  const PING_MS = 2000;
  const watchServer = async () => {
    while (document.body.dataset.race !== "idle") {
      await new Promise((resolve) => setTimeout(resolve, PING_MS));
      try {
        await fetch(location.href, { method: "HEAD", cache: "no-store" });
      } catch {
        specdemo.stage.lost();
      }
    }
  };

  // Race was pressed: say so before the server answers.
  specdemo.begin = () => {
    if (document.body.dataset.race !== "idle") return; // the keyboard asks again while a race runs
    specdemo.stage.player.pause();
    specdemo.setState("waiting");
    watchServer();
    specdemo.stage.say(text("wait_start"), "wait");
    specdemo.stage.comeIntoView();
  };

  // The form took a prompt and a draft length: race them.
  specdemo.press = () => document.querySelector("#race-button").click();

  // The stream is over, whatever its last word was.
  specdemo.finished = () => specdemo.stage.lost();
})(window.specdemo);
