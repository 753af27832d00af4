// One lane: a card with its text, its speed and its numbers. It draws one log record at a time, so the live race and
// the replay are the same code.
(function (specdemo) {
  "use strict";
  const { make, text, show, FATES } = specdemo;

  const GHOSTS = new Set(["rejected", "discarded", "clipped"]);
  const STATS = {
    standard: ["tokens", "ttft", "time"],
    speculative: ["tokens", "ttft", "time", "acceptance", "alpha", "length", "rounds"],
    ssd: ["tokens", "ttft", "time", "acceptance", "length", "rounds", "hits"],
  };
  const FORMAT = {
    tokens: show.count,
    ttft: show.seconds,
    time: show.seconds,
    acceptance: show.share,
    alpha: show.decimal,
    length: show.decimal,
    rounds: show.count,
    hits: show.share,
  };

  const UNTOLD = "□"; // a refused draft that a server counts and does not spell out

  // A token that was not kept takes part in nothing but the looks; a line break in it must not break the line.
  const ghostText = (string) => string.replace(/\r\n|\n|\r/g, "↵").replace(/\t/g, "⇥");

  class Lane {
    constructor(name) {
      this.name = name;
      this.build();
      this.clear();
    }

    build() {
      const stat = (key) => {
        const value = make("dd", { class: "sd-stat-value" });
        this.stats[key] = value;
        return make("div", { class: "sd-stat", title: text(`stat_${key}_about`), "data-stat": key },
          make("dt", { class: "sd-stat-name" }, text(`stat_${key}`)), value);
      };
      this.stats = {};
      this.state = make("span", { class: "sd-lane-state" });
      this.copyButton = make("button", { class: "sd-small-button sd-copy", type: "button", disabled: true }, text("copy"));
      this.body = make("div", { class: "sd-text", tabindex: "0", role: "region", "aria-label": text(`lane_${this.name}`) });
      this.output = make("div", { class: "sd-output", dir: "auto" });
      this.placeholder = make("div", { class: "sd-placeholder" }, text(`lane_empty_${this.name}`));
      this.body.append(this.placeholder, this.output);
      this.runs = make("div", { class: "sd-runs" });
      this.element = make("section", { class: `sd-lane sd-lane-${this.name}`, "data-lane": this.name },
        make("header", { class: "sd-lane-head" },
          make("div", {},
            make("h3", {}, text(`lane_${this.name}`)),
            make("p", {}, text(`lane_${this.name}_about`))),
          make("div", { class: "sd-lane-side" }, this.state, this.copyButton)),
        this.body,
        make("dl", { class: "sd-stats" }, ...STATS[this.name].map(stat)),
        this.runs);
      this.copyButton.addEventListener("click", () => this.copyAll());
      this.output.addEventListener("copy", (event) => this.copySelection(event));
    }

    emptied() {
      this.tokens = []; // {element, text, kept}
      this.line = null; // the block that the next token goes to; null: a new one
      this.output.replaceChildren();
    }

    clear() {
      this.emptied();
      this.replayed = false;
      this.placeholder.hidden = false;
      this.runs.replaceChildren();
      this.numbers({});
      this.setState("idle");
      this.copyButton.disabled = true;
    }

    // Emptied, to be drawn again from its records: they are not being written now.
    rewind() {
      this.clear();
      this.setState("replay");
      this.replayed = true;
    }

    setState(state) {
      this.element.dataset.state = state;
      this.state.textContent = text(`state_${state}`);
    }

    // The lane's output so far, exactly.
    text() {
      return this.tokens.map((token) => (token.kept ? token.text : "")).join("");
    }

    apply(record) {
      switch (record.k) {
        case "lane":
          if (!this.replayed) this.setState("running");
          this.describe(record);
          break;
        case "first":
          this.add(record.x, "plain", 0, "x");
          break;
        case "piece":
          this.add(record.x, "plain", -1, "piece");
          break;
        case "retold":
          this.emptied();
          break;
        case "round":
          record.j.forEach(([string, fate], place) => this.add(string, FATES[fate], record.n, place));
          if (record.x !== undefined) this.add(record.x, record.e ?? "plain", record.n, "x");
          break;
        case "numbers":
          this.numbers(record);
          break;
        case "end":
          this.cut(record.keep);
          if (record.add) this.add(record.add, "plain");
          this.setState(record.why);
          this.remark(record.notes ?? []);
          break;
        case "failed":
          this.setState("failed");
          this.runs.append(make("p", { class: "sd-lane-error", role: "alert" }, specdemo.said(record.message)));
          break;
      }
    }

    // place: index among the round's drafted tokens, or "x" for its extra token
    add(string, fate, round, place) {
      const kept = !GHOSTS.has(fate);
      const attributes = { class: `sd-token sd-${fate}`, "data-fate": fate, "data-round": round, "data-place": place };
      if (!kept) attributes["aria-hidden"] = "true";
      if (!kept && string === UNTOLD) attributes.class += " sd-untold";
      const element = make("span", attributes, kept ? string : ghostText(string));
      this.tokens.push({ element, text: string, kept });
      if (!this.placeholder.hidden) {
        this.placeholder.hidden = true;
        this.copyButton.disabled = false;
      }
      // each line of the text is a block of its own, so that a new token does not lay out all before it again
      if (!this.line) this.output.append((this.line = make("div", { class: "sd-line" })));
      this.line.append(element);
      if (kept && string.endsWith("\n")) this.line = null;
    }

    // Draw a batch of records. The end stays in view unless the reader scrolled away from it; the layout is asked
    // for once before and once after, never for each token.
    draw(records) {
      if (!records.length) return;
      const atEnd = this.body.scrollHeight - this.body.scrollTop - this.body.clientHeight < 40;
      for (const record of records) this.apply(record);
      if (atEnd) this.body.scrollTop = this.body.scrollHeight;
    }

    // What was kept beyond the first `keep` UTF-16 units turns into clipped: a stop string was found late.
    cut(keep) {
      let room = keep;
      const tokens = [];
      for (const token of this.tokens) {
        if (!token.kept || token.text.length <= room) {
          if (token.kept) room -= token.text.length;
          tokens.push(token);
          continue;
        }
        const rest = token.text.slice(room);
        if (room > 0) {
          token.text = token.text.slice(0, room);
          token.element.textContent = token.text;
          tokens.push(token);
        } else {
          token.element.remove();
        }
        const element = make("span",
          { class: "sd-token sd-clipped", "data-fate": "clipped", "data-round": token.element.dataset.round,
            "data-place": token.element.dataset.place, "aria-hidden": "true" },
          ghostText(rest));
        const after = tokens.length ? tokens[tokens.length - 1].element : null;
        if (after) after.after(element);
        else this.output.prepend(element);
        tokens.push({ element, text: rest, kept: false });
        room = 0;
      }
      this.tokens = tokens;
    }

    numbers(record) {
      for (const [key, element] of Object.entries(this.stats)) {
        element.textContent = FORMAT[key](key === "time" ? record.t : record[key]);
      }
      if (this.onSpeed) this.onSpeed(record);
    }

    describe(record) {
      const model = (name, precision, path) => [name, precision, path].filter(Boolean).join(", ");
      const line = (label, value) => make("p", {}, make("strong", {}, text(label)), " ", value);
      this.runs.replaceChildren(line("target_is", model(record.target, record.precision, record.path) + ", " + record.device));
      if (this.name !== "standard") {
        const drafter = text(`method_used_${record.method}`);
        this.runs.append(line("drafter_is", record.draft ? `${drafter}: ${model(...record.draft)}` : drafter));
      }
      const time = record.clock === "client" ? "stat_client_time" : "stat_time";
      const stat = this.stats.time.parentElement;
      stat.firstElementChild.textContent = text(time);
      stat.title = text(`${time}_about`);
      if (record.clock === "client") {
        const network = record.network ? " " + text("lane_network", { time: show.seconds(record.network) }) : "";
        this.runs.append(make("p", { class: "sd-note" }, text("lane_client") + network));
      }
      this.remark(record.notes);
    }

    remark(notes) {
      for (const note of notes) this.runs.append(make("p", { class: "sd-note" }, specdemo.said(note)));
    }

    async copyAll() {
      const done = await specdemo.copy(this.text());
      this.copyButton.textContent = text(done ? "copied" : "copy_failed");
      setTimeout(() => (this.copyButton.textContent = text("copy")), 1500);
    }

    // The browser's own copy would turn no-break spaces into spaces and take colours along.
    copySelection(event) {
      const selection = document.getSelection();
      if (!selection || selection.rangeCount === 0) return;
      const range = selection.getRangeAt(0);
      let copied = "";
      for (const token of this.tokens) {
        const node = token.element.firstChild;
        if (!token.kept || !node || !range.intersectsNode(node)) continue;
        const from = node === range.startContainer ? range.startOffset : 0;
        const to = node === range.endContainer ? range.endOffset : node.data.length;
        copied += token.text.slice(from, to);
      }
      event.clipboardData.setData("text/plain", copied);
      event.preventDefault();
    }
  }

  specdemo.Lane = Lane;
})(window.specdemo);
