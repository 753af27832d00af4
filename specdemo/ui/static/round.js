// One round as a picture: the draft's K tokens, the target's one pass over K + 1 positions, the verdict on each, what
// stays, and what rolls back. A column is a position.
(function (specdemo) {
  "use strict";
  const { make, text, show, visible } = specdemo;

  const SIGNS = { accepted: "✓", rejected: "✗", discarded: "·", clipped: "✂" };

  class RoundPicture {
    // ask(round, place): somebody wants to know why.
    constructor(ask) {
      this.ask = ask;
      this.title = make("h3", {});
      this.story = make("p", { class: "sd-round-story" });
      this.grid = make("div", { class: "sd-round-grid" });
      this.element = make("section", { class: "sd-card sd-round", "aria-label": text("round_label") },
        make("header", { class: "sd-card-head" }, this.title, this.story),
        make("div", { class: "sd-round-scroll" }, this.grid));
      this.shown = null;
    }

    clear() {
      this.shown = null;
      this.grid.replaceChildren();
    }

    show(story, t) {
      const { rounds } = story.lanes[story.subject];
      const round = rounds[Math.max(0, story.roundAt(story.subject, t))];
      this.element.hidden = !round; // of text that came in pieces there is nothing to draw
      if (!round || round === this.shown) return;
      this.shown = round;
      const k = round.j.length;
      const kept = round.j.filter((token) => token.fate === "accepted").length;
      this.title.textContent = round.n ? text("round_title", { n: round.n }) : text("round_title_first");
      this.story.textContent = this.tell(round, k, kept);
      this.grid.style.setProperty("--columns", k + 1);
      this.grid.replaceChildren(...(k ? this.draft(round, k) : []), ...this.pass(round, k), ...this.verdicts(round, k), ...this.outcome(round, k, kept));
    }

    tell(round, k, kept) {
      if (!round.n) return text("round_story_first");
      if (!k) return text("round_story_none");
      const end = round.x ? `_${round.x.fate}` : "_cut";
      return text(`round_story${end}`, { k, kept, all: kept + 1 });
    }

    name(key, note) {
      return make("div", { class: "sd-round-name" }, make("strong", {}, text(key)), note ? make("span", {}, note) : null);
    }

    box(round, token, place, column, ...more) {
      const box = make("button",
        { type: "button", class: `sd-box sd-${token.fate}`, style: `grid-column: ${column + 2}`, dir: "auto", title: text("why_ask") },
        make("span", { class: "sd-box-text" }, visible(token.text)), ...more);
      box.addEventListener("click", () => this.ask(round.n, place, box));
      return box;
    }

    // A server tells no times of its phases, and neither p nor q.
    seconds(value) {
      return value ? show.seconds(value) : "";
    }

    share(name, value) {
      return value === null ? null : make("span", { class: "sd-box-note" }, `${name} ${show.percent(value)}`);
    }

    draft(round, k) {
      const source = text(`origin_${round.why?.o ?? "none"}`);
      const origin = round.missed ? text("origin_missed", { source }) : source;
      return [
        this.name("round_draft", [origin, this.seconds(round.s[0])].filter(Boolean).join(", ")),
        ...round.j.map((token, i) => this.box(round, { text: token.text, fate: "drafted" }, i, i,
          this.share("q", round.why?.j[i][3] ?? round.why?.j[i][1]))),
        make("div", { class: "sd-box-gap", style: `grid-column: ${k + 2}` }),
      ];
    }

    pass(round, k) {
      return [
        this.name("round_pass", this.seconds(round.s[1])),
        make("div", { class: "sd-pass" }, text(k ? "round_pass_over" : "round_pass_one", { n: k + 1 })),
      ];
    }

    verdicts(round, k) {
      if (!k) return [];
      return [
        this.name("round_verdict"),
        ...round.j.map((token, i) => make("div",
          { class: `sd-verdict sd-verdict-${token.fate}`, style: `grid-column: ${i + 2}`, title: text(`fate_${token.fate}_about`) },
          make("span", { class: "sd-sign", "aria-hidden": "true" }, SIGNS[token.fate]),
          make("span", { class: "sd-verdict-word" }, text(`fate_${token.fate}`)),
          token.fate === "discarded" || token.fate === "clipped" ? null
            : this.share("p", round.why?.j[i][2] ?? round.why?.j[i][0]))),
        make("div", { class: "sd-verdict sd-verdict-extra", style: `grid-column: ${k + 2}` },
          round.x?.fate === "bonus" ? make("span", { class: "sd-verdict-word" }, text("fate_bonus")) : null),
      ];
    }

    outcome(round, k, kept) {
      const boxes = round.j.slice(0, kept).map((token, i) => this.box(round, token, i, i));
      if (round.x) boxes.push(this.box(round, round.x, "x", kept));
      const from = kept + (round.x ? 1 : 0);
      const back = k - kept;
      if (back > 0 && from <= k) {
        boxes.push(make("div", { class: "sd-rollback", style: `grid-column: ${from + 2} / ${k + 3}` }, text("round_back", { n: back })));
      } else if (back > 0) {
        boxes.push(make("div", { class: "sd-rollback sd-rollback-line" }, text("round_back", { n: back })));
      }
      return [this.name("round_kept"), ...boxes];
    }
  }

  specdemo.RoundPicture = RoundPicture;
})(window.specdemo);
