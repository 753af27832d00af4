// The race: reads the log as it grows, hands each record to its lane, and draws what stands between the lanes.
(function (specdemo) {
  "use strict";
  const { make, text, show, Lane } = specdemo;

  const LANES = ["standard", "speculative"];
  const DRAWN = new Set(["lane", "first", "round", "numbers", "ratio", "same", "end", "failed"]); // and replayed
  const LEGEND = ["accepted", "rejected", "discarded", "recovered", "bonus", "clipped", "plain"];

  class Stage {
    constructor(root) {
      this.lanes = LANES.map((name) => new Lane(name));
      this.records = []; // of the race on show
      this.log = { id: null, read: 0 };
      this.budget = 0;
      this.build(root);
      this.compare(null);
      this.ratio(null);
    }

    build(root) {
      const score = (lane, index) => {
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
      };
      this.ratioValue = make("span", { class: "sd-ratio-value" });
      this.ratioWord = make("span", { class: "sd-ratio-word" });
      this.banner = make("div", { class: "sd-banner", hidden: true });
      this.sameLine = make("div", { class: "sd-same" });
      this.replayButton = make("button", { class: "sd-small-button sd-replay", type: "button", disabled: true }, text("replay"));
      this.replayNote = make("span", { class: "sd-replay-note", hidden: true }, text("replay_note"));
      // the form's own Stop may be out of sight
      const stop = make("button", { class: "sd-small-button sd-stop", type: "button" }, text("stop"));
      stop.addEventListener("click", () => document.querySelector("#stop-button").click());
      const onlyKept = make("input", { type: "checkbox", class: "sd-only-kept" });
      onlyKept.addEventListener("change", () => this.element.classList.toggle("sd-kept-only", onlyKept.checked));
      this.replayButton.addEventListener("click", () => (this.replaying ? this.finishReplay() : this.startReplay()));
      this.spoken = make("p", { class: "sd-spoken", role: "status" }); // for those who do not see the race
      this.element = make("div", { class: "sd-stage-inner" },
        this.banner,
        this.spoken,
        make("div", { class: "sd-scores" },
          score(this.lanes[0]),
          make("div", { class: "sd-ratio" }, this.ratioValue, this.ratioWord, stop),
          score(this.lanes[1])),
        make("div", { class: "sd-lanes" }, ...this.lanes.map((lane) => lane.element)),
        make("div", { class: "sd-under" },
          this.sameLine,
          make("div", { class: "sd-actions" }, this.replayNote, this.replayButton)),
        make("div", { class: "sd-legend", role: "group", "aria-label": text("legend") },
          make("ul", {}, ...LEGEND.map((fate) => make("li", { title: text(`fate_${fate}_about`) },
            make("span", { class: `sd-token sd-${fate}` }, text(`fate_${fate}`)),
            make("span", { class: "sd-legend-about" }, text(`fate_${fate}_about`))))),
          make("label", { class: "sd-switch" }, onlyKept, make("span", {}, text("only_kept")))),
        make("p", { class: "sd-clock-note" }, text("clock_note")));
      root.append(this.element);
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

    show(records) {
      this.records.push(...records);
      this.draw(records);
    }

    take(record) {
      switch (record.k) {
        case "wait":
          specdemo.setState("waiting");
          this.say(this.waitText(record), "wait");
          break;
        case "error":
          this.say(record.message, "error");
          break;
        case "race":
          this.begin(record);
          break;
        case "done":
          if (record.ok) this.spoken.textContent = text("spoken_end", { ratio: this.ratioValue.textContent });
          this.over();
          break;
      }
    }

    draw(records) {
      this.lanes.forEach((lane, index) => lane.draw(records.filter((record) => record.l === index)));
      const latest = (kind) => records.filter((record) => record.k === kind).at(-1);
      const ratio = latest("ratio");
      if (ratio) this.ratio(ratio.v);
      const same = latest("same");
      if (same) this.compare(same);
    }

    begin(record) {
      this.stopReplay();
      this.records = [];
      this.budget = record.budget;
      this.greedy = record.greedy;
      this.clear();
      this.ratio(null);
      this.compare(null);
      for (const lane of this.lanes) lane.setState("waiting");
      this.say(null);
      this.spoken.textContent = text("spoken_begin");
      this.replayButton.disabled = true;
      specdemo.setState("running");
    }

    clear() {
      for (const lane of this.lanes) lane.clear();
    }

    // Also called when the stream ended without a word.
    over() {
      specdemo.setState("idle");
      this.replayButton.disabled = !this.records.some((record) => record.k === "round");
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
        const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
        this.element.scrollIntoView({ block: "start", behavior: calm ? "auto" : "smooth" });
      }
    }

    say(sentence, kind = "") {
      this.banner.hidden = !sentence;
      this.banner.className = `sd-banner sd-banner-${kind}`;
      this.banner.setAttribute("role", kind === "error" ? "alert" : "status");
      this.banner.textContent = sentence ?? "";
    }

    waitText(record) {
      if (record.why === "line") return record.place > 1 ? text("wait_line", record) : text("wait_line_next");
      return text(`wait_${record.why}`) + (record.message ? ` ${record.message}` : "");
    }

    ratio(value) {
      const word = value === null ? "waiting" : value > 1 ? "faster" : value < 1 ? "slower" : "equal";
      this.ratioValue.textContent = show.ratio(value);
      this.ratioWord.textContent = text(`ratio_${word}`);
      this.ratioValue.parentElement.dataset.ratio = word;
    }

    compare(record) {
      const line = this.sameLine;
      line.replaceChildren();
      line.dataset.same = "";
      if (record === null) {
        if (this.greedy === false) this.verdict("sampled", text("same_sampled"));
        return;
      }
      if (record.at === null) {
        const key = !record.final ? "same_running" : record.cut ? "same_prefix" : "same_final";
        this.verdict("equal", text(key, record));
        return;
      }
      const token = (pair) => (pair ? JSON.stringify(pair[1]) : text("same_end_of_text"));
      this.verdict("parted", text("same_parts", { at: record.at + 1, a: token(record.a), b: token(record.b) }));
      line.append(" ", text(record.numerics ? "same_numerics" : "same_bug"));
    }

    verdict(same, sentence) {
      this.sameLine.dataset.same = same;
      this.sameLine.append(sentence);
    }

    // Both lanes at once, each record when its own lane's clock says so. Nothing is computed: the log has it all.
    startReplay() {
      const queues = this.lanes.map((_, index) => this.records.filter((record) => record.l === index));
      const positions = queues.map(() => 0);
      this.clear();
      for (const lane of this.lanes) lane.setState("replay");
      this.replayNote.hidden = false;
      this.replayButton.textContent = text("replay_skip");
      const began = performance.now();
      const frame = () => {
        const elapsed = (performance.now() - began) / 1000;
        this.lanes.forEach((lane, index) => {
          const from = positions[index];
          while (positions[index] < queues[index].length && queues[index][positions[index]].t <= elapsed) positions[index]++;
          lane.draw(queues[index].slice(from, positions[index]));
        });
        if (positions.every((position, index) => position >= queues[index].length)) this.finishReplay();
        else this.replaying = requestAnimationFrame(frame);
      };
      this.replaying = requestAnimationFrame(frame);
    }

    finishReplay() {
      this.stopReplay();
      this.clear();
      this.draw(this.records);
    }

    stopReplay() {
      if (this.replaying) cancelAnimationFrame(this.replaying);
      this.replaying = null;
      this.replayNote.hidden = true;
      this.replayButton.textContent = text("replay");
    }
  }

  specdemo.mountStage = (root, log, watch) => {
    const stage = new Stage(root);
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
    specdemo.setState("waiting");
    watchServer();
    specdemo.stage.say(text("wait_start"), "wait");
    specdemo.stage.comeIntoView();
  };

  // The stream is over, whatever its last word was.
  specdemo.finished = () => specdemo.stage.lost();
})(window.specdemo);
