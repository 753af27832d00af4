// All methods on one prompt: how far the comparison is, what each method was worth as bars in a table, and the fastest
// with the lines that use it in other programs.
(function (specdemo) {
  "use strict";
  const { make, text, show } = specdemo;

  const COLUMNS = [
    // key of the row, how it is shown, the value at which its bar is full (null: the greatest there is)
    ["tokens_per_second", show.speed, null],
    ["speedup", show.ratio, null],
    ["acceptance_rate", show.share, 1],
    ["mean_acceptance_length", show.decimal, null],
  ];

  class Comparison {
    constructor(root, act) {
      this.act = act;
      this.rows = [];
      this.log = { head: null, read: 0 };
      this.button = make("button", { type: "button", class: "sd-small-button sd-compare-button" }, text("compare"));
      this.button.addEventListener("click", () => this.start());
      this.stop = make("button", { type: "button", class: "sd-small-button sd-compare-stop", hidden: true }, text("stop"));
      this.stop.addEventListener("click", () => document.querySelector("#stop-button").click());
      this.fill = make("span", { class: "sd-track-fill" });
      this.track = make("span", { class: "sd-track sd-compare-track", "aria-hidden": "true", hidden: true }, this.fill);
      this.status = make("p", { class: "sd-compare-status", role: "status" });
      this.body = make("tbody");
      this.table = make("table", { class: "sd-compare-table", hidden: true },
        make("caption", { class: "sd-spoken" }, text("compare")),
        make("thead", {}, make("tr", {},
          ...["method", ...COLUMNS.map(([key]) => key), "equal"].map((key) => make("th", { scope: "col", title: text(`compare_${key}_about`) }, text(`compare_${key}`))))),
        this.body);
      this.winner = make("div", { class: "sd-compare-winner", hidden: true });
      root.append(make("section", { class: "sd-compare", "aria-label": text("compare") },
        make("div", { class: "sd-compare-head" },
          make("div", {}, make("h3", {}, text("compare_heading")), make("p", {}, text("compare_about"))),
          make("div", { class: "sd-compare-buttons" }, this.button, this.stop)),
        this.track, this.status, make("div", { class: "sd-compare-scroll", tabindex: "0", role: "region", "aria-label": text("compare") }, this.table), this.winner));
    }

    start() {
      if (document.body.dataset.race !== "idle") return;
      this.clear();
      this.run("waiting");
      this.status.textContent = text("wait_start");
      this.act.compare_all();
    }

    clear() {
      this.rows = [];
      this.body.replaceChildren();
      this.winner.replaceChildren();
      this.winner.hidden = this.table.hidden = true;
      this.status.classList.remove("sd-share-bad");
    }

    run(state) {
      specdemo.setState(state);
      this.stop.hidden = this.track.hidden = state === "idle";
      this.button.disabled = state !== "idle";
    }

    // The log as it is now: a longer one of the same comparison, or a new one.
    read(log) {
      const head = log.slice(0, log.indexOf("\n") + 1);
      if (!head) return;
      if (head !== this.log.head) {
        this.clear();
        this.log = { head, read: head.length };
      }
      const end = log.lastIndexOf("\n") + 1;
      const lines = log.slice(this.log.read, end).split("\n");
      this.log.read = Math.max(this.log.read, end);
      for (const line of lines) if (line) this.take(JSON.parse(line));
    }

    take(record) {
      switch (record.k) {
        case "wait":
          this.run("waiting");
          this.status.textContent = specdemo.stage.waitText(record);
          break;
        case "error":
          this.status.textContent = specdemo.said(record.message);
          this.status.classList.add("sd-share-bad");
          break;
        case "step":
          if (document.body.dataset.race !== "running") this.run("running");
          this.fill.style.transform = `scaleX(${(record.i + record.s) / record.n})`;
          this.status.textContent = text("compare_running", { method: this.name(record.m), i: record.i + 1, n: record.n });
          break;
        case "row":
          this.rows.push(record);
          this.draw();
          break;
        case "winner":
          this.crown(record);
          break;
        case "done":
          this.over(record.ok);
          break;
      }
    }

    over(ok) {
      if (document.body.dataset.race !== "idle") this.run("idle");
      this.stop.hidden = this.track.hidden = true;
      this.button.disabled = false;
      if (ok) this.status.textContent = this.winner.hidden ? text("compare_stopped") : "";
    }

    name(method) {
      return text(`compare_name_${method}`);
    }

    draw() {
      this.table.hidden = false;
      const greatest = (key) => Math.max(...this.rows.map((row) => row[key] ?? 0), Number.MIN_VALUE);
      this.body.replaceChildren(...this.rows.map((row) => {
        const name = make("th", { scope: "row" }, this.name(row.method));
        if (row.reason) return make("tr", { "data-method": row.method }, name, make("td", { colspan: COLUMNS.length + 1, class: "sd-compare-reason" }, specdemo.said(row.reason)));
        const cells = COLUMNS.map(([key, format, full]) => {
          const bar = make("span", { class: "sd-bar", "aria-hidden": "true" });
          bar.style.transform = `scaleX(${Math.min(1, (row[key] ?? 0) / (full ?? greatest(key)))})`;
          return make("td", { "data-column": key }, make("span", { class: "sd-bar-value" }, format(row[key])), make("span", { class: "sd-bar-track", "aria-hidden": "true" }, bar));
        });
        const equal = row.equal === null ? text("none") : text(row.equal ? "compare_equal_yes" : "compare_equal_no");
        return make("tr", { "data-method": row.method, "data-slower": row.speedup !== null && row.speedup < 1 }, name, ...cells, make("td", {}, equal));
      }));
    }

    crown(record) {
      const plain = record.m === "standard" || record.m === "hf";
      this.winner.hidden = false;
      this.body.querySelector(`[data-method="${record.m}"]`)?.classList.add("sd-compare-first");
      this.winner.replaceChildren(
        make("p", { class: "sd-compare-verdict" }, text(plain ? "compare_winner_plain" : "compare_winner", { method: this.name(record.m), speedup: show.ratio(record.speedup) })),
        make("p", { class: "sd-compare-about" }, text("compare_elsewhere")),
        ...record.usages.map(([program, code, ownDraft]) => {
          const copy = make("button", { type: "button", class: "sd-small-button" }, text("copy"));
          copy.addEventListener("click", async () => {
            copy.textContent = text((await specdemo.copy(code)) ? "copied" : "copy_failed");
            setTimeout(() => (copy.textContent = text("copy")), 1500);
          });
          return make("div", { class: "sd-usage", "data-program": program },
            make("div", { class: "sd-usage-head" }, make("strong", {}, program), copy),
            make("pre", { tabindex: "0" }, make("code", {}, code)),
            ownDraft ? make("p", { class: "sd-compare-about" }, text("compare_own_draft")) : null);
        }));
    }
  }

  specdemo.mountCompare = (root, value, watch, act) => {
    const comparison = new Comparison(root, act);
    specdemo.comparison = comparison;
    comparison.read(value() ?? "");
    watch("value", () => comparison.read(value() ?? ""));
  };

  // The stream is over, whatever its last word was.
  specdemo.compared = () => {
    if (document.body.dataset.race === "idle") return;
    specdemo.comparison.status.textContent = text("error_lost");
    specdemo.comparison.over(false);
  };
})(window.specdemo);
