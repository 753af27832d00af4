// Why this token? One panel for all tokens: it follows the pointer, a tap, or the arrow keys inside a lane.
(function (specdemo) {
  "use strict";
  const { make, text, show, visible } = specdemo;

  const HOVER_MS = 90;
  const GAP = 8; // px between a token and the panel
  const JUDGED = new Set(["accepted", "rejected"]);

  class Why {
    // story(): the race on show. signal: when to stop listening to the document.
    constructor(lanes, story, signal) {
      this.lanes = lanes;
      this.story = story;
      this.chosen = null;
      this.pinned = false;
      this.content = make("div", { class: "sd-why-content" });
      this.spoken = make("p", { class: "sd-spoken sd-why-spoken", role: "status" });
      this.close = make("button", { type: "button", class: "sd-small-button sd-why-close", "aria-label": text("why_close"), title: text("why_close") }, "✕");
      this.close.addEventListener("click", () => this.hide());
      this.element = make("aside", { class: "sd-why", hidden: true, "aria-label": text("why_title") }, this.close, this.content);
      lanes.forEach((lane, index) => this.listen(lane, index));
      document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide(), { signal });
      document.addEventListener("pointerdown", (event) => {
        const inside = this.element.contains(event.target) || event.target.closest?.(".sd-token, .sd-box");
        if (this.pinned && !inside) this.hide();
      }, { signal });
      addEventListener("scroll", () => this.place(), { capture: true, passive: true, signal });
      addEventListener("resize", () => this.place(), { signal });
    }

    listen(lane, index) {
      let wait = null;
      lane.output.addEventListener("pointerover", (event) => {
        clearTimeout(wait);
        const token = event.target.closest(".sd-token");
        if (token && event.pointerType === "mouse" && !this.pinned) wait = setTimeout(() => this.show(token, index), HOVER_MS);
      });
      lane.output.addEventListener("pointerleave", () => {
        clearTimeout(wait);
        if (!this.pinned) this.hide();
      });
      lane.output.addEventListener("click", (event) => {
        clearTimeout(wait); // or the pointer's own wish would open what was closed meanwhile
        const token = event.target.closest(".sd-token");
        if (!token || !document.getSelection().isCollapsed) return; // some text was selected
        if (this.pinned && token === this.chosen) this.hide();
        else this.pin(token, index);
      });
      lane.body.addEventListener("keydown", (event) => this.key(event, lane, index));
      lane.body.addEventListener("blur", () => this.pinned && this.byKey && this.hide());
    }

    key(event, lane, index) {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const tokens = [...lane.output.querySelectorAll(".sd-token")].filter((token) => token.dataset.round !== undefined && token.offsetParent !== null);
      if (!tokens.length) return;
      const forth = getComputedStyle(lane.output).direction === "rtl" ? "ArrowLeft" : "ArrowRight";
      const here = tokens.indexOf(this.chosen);
      const wanted = {
        ArrowRight: here < 0 ? 0 : here + (forth === "ArrowRight" ? 1 : -1),
        ArrowLeft: here < 0 ? 0 : here + (forth === "ArrowLeft" ? 1 : -1),
        Home: 0,
        End: tokens.length - 1,
      }[event.key];
      if (wanted === undefined) return;
      event.preventDefault();
      const token = tokens[Math.min(Math.max(0, wanted), tokens.length - 1)];
      token.scrollIntoView({ block: "nearest" });
      this.pin(token, index);
      this.byKey = true;
      this.spoken.textContent = this.summary;
    }

    pin(token, index) {
      this.show(token, index);
      this.pinned = !this.element.hidden;
      this.byKey = false;
    }

    // A box of the round's picture was pressed: the same panel, beside the box.
    ask(round, place, anchor) {
      const { subject } = this.story();
      const lane = this.lanes[subject];
      const token = [...lane.output.querySelectorAll(".sd-token")].find((element) => element.dataset.round === String(round) && element.dataset.place === String(place));
      if (!token) return;
      this.pin(token, subject);
      this.anchor = anchor;
      this.place();
      this.spoken.textContent = this.summary;
    }

    show(token, index) {
      if (token.dataset.place === "piece") return this.tellPiece(token);
      const round = this.story().round(index, Number(token.dataset.round));
      if (token.dataset.round === undefined || !round?.why) return;
      this.mark(null);
      this.mark(token);
      this.anchor = token;
      const { place, fate } = token.dataset;
      const string = place === "x" ? round.x.text : round.j[place].text;
      const position = place === "x" ? round.j.filter((other) => other.fate === "accepted").length : Number(place);
      const parts = place === "x" ? this.drawn(round, fate) : this.judged(round, Number(place), fate);
      const where = round.n ? text("why_where", { round: round.n, position: position + 1, all: round.j.length + 1 }) : text("why_where_first");
      this.summary = `${visible(string)}. ${text(`fate_${fate}`)}. ${where}. ${parts.sentence}`;
      this.content.replaceChildren(
        make("header", { class: "sd-why-head" },
          make("span", { class: `sd-token sd-${fate} sd-why-token`, dir: "auto" }, visible(string)),
          make("span", { class: "sd-why-fate" }, text(`fate_${fate}`)),
          make("span", { class: "sd-why-where" }, where)),
        make("p", { class: "sd-why-sentence" }, parts.sentence),
        ...parts.rest);
      this.element.hidden = false;
      this.element.scrollTop = 0;
      this.place();
    }

    // Text of which a server has told no round.
    tellPiece(token) {
      this.mark(null);
      this.mark(token);
      this.anchor = token;
      this.summary = `${visible(token.textContent)}. ${text("why_piece")}`;
      this.content.replaceChildren(
        make("header", { class: "sd-why-head" }, make("span", { class: "sd-token sd-plain sd-why-token", dir: "auto" }, visible(token.textContent))),
        make("p", { class: "sd-why-sentence" }, text("why_piece")));
      this.element.hidden = false;
      this.place();
    }

    // A token of a lane whose server tells neither p nor q.
    untold(fate) {
      return { sentence: `${text(`fate_${fate}_about`)}. ${text("why_served")}`, rest: [] };
    }

    // A token that was drafted: [p, q, raw p, raw q, acceptance probability, draw, target's top, drafter's top].
    judged(round, place, fate) {
      const [p, q, rawP, rawQ, acceptance, draw, targetTop, draftTop] = round.why.j[place];
      if (p === null) return this.untold(fate);
      const greedy = this.story().greedy;
      const block = this.story().lanes[this.story().subject].about?.rule === "block";
      const rule = JUDGED.has(fate) ? (block ? "_block" : greedy ? "_greedy" : "") : "";
      const sentence = text(`why_${fate}${rule}`, { a: show.probability(acceptance), u: show.probability(draw) });
      const rows = [
        [text("why_p"), show.probability(p), show.probability(rawP)],
        [text("why_q"), show.probability(q), show.probability(rawQ)],
      ];
      const looked = JUDGED.has(fate) || block;
      const string = round.j[place].text;
      return {
        sentence,
        rest: [
          looked ? this.gauge(acceptance, draw) : null,
          this.figures(rows),
          this.tops([["why_top_target", targetTop], ["why_top_draft", draftTop]], string),
        ].filter(Boolean),
      };
    }

    // A token drawn from the target: [p, raw p, top].
    drawn(round, fate) {
      const [p, rawP, top] = round.why.x;
      if (p === null) return this.untold(fate);
      const kept = round.j.filter((token) => token.fate === "accepted").length;
      const rule = fate === "recovered" && !round.why.r ? (this.story().greedy ? "_greedy" : "_block") : "";
      const sentence = text(fate === "plain" && !round.n ? "why_first" : `why_${fate}${rule}`, { k: round.j.length });
      const refused = fate === "recovered" ? round.why.j[kept]?.[7] : null;
      const lists = [["why_top_target", top]];
      if (refused?.length && !round.why.r) lists.push(["why_top_draft", refused]);
      return {
        sentence,
        rest: [
          this.figures([[text("why_p"), show.probability(p), show.probability(rawP)]]),
          round.why.r ? this.residual(round.why.r, round.x.text) : null,
          this.tops(lists, round.x.text),
        ].filter(Boolean),
      };
    }

    gauge(acceptance, draw) {
      const percent = (value) => `${100 * Math.min(1, Math.max(0, value))}%`;
      return make("div", { class: "sd-gauge" },
        make("div", { class: "sd-gauge-bar", "aria-hidden": "true" },
          make("span", { class: "sd-gauge-fill", style: `width: ${percent(acceptance)}` }),
          make("span", { class: "sd-gauge-draw", style: `left: ${percent(draw)}` })),
        make("div", { class: "sd-gauge-words" },
          make("span", {}, text("why_acceptance", { a: show.probability(acceptance) })),
          make("span", {}, text("why_draw", { u: show.probability(draw) }))));
    }

    figures(rows) {
      return make("table", { class: "sd-why-figures" },
        make("thead", {}, make("tr", {}, make("td", {}), make("th", { scope: "col" }, text("why_sampled")), make("th", { scope: "col" }, text("why_raw")))),
        make("tbody", {}, ...rows.map(([name, ...values]) =>
          make("tr", {}, make("th", { scope: "row" }, name), ...values.map((value) => make("td", {}, value))))));
    }

    tops(lists, string) {
      const list = ([key, top]) => make("div", { class: "sd-top" },
        make("h4", {}, text(key)),
        make("ol", {}, ...top.map(([word, probability]) => make("li", { class: word === string ? "sd-top-this" : null },
          make("span", { class: "sd-top-bar", "aria-hidden": "true", style: `transform: scaleX(${probability})` }),
          make("span", { class: "sd-top-word", dir: "auto" }, visible(word)),
          make("span", { class: "sd-top-value" }, show.percent(probability))))));
      const full = lists.filter(([, top]) => top?.length);
      return full.length ? make("div", { class: "sd-tops" }, ...full.map(list)) : null;
    }

    // What the target gives more than the drafter: where the recovered token was drawn.
    residual(rows, string) {
      const range = (least, most) => (show.probability(least) === show.probability(most) ? show.probability(most) : `${show.probability(least)} – ${show.probability(most)}`);
      return make("table", { class: "sd-why-figures sd-residual" },
        make("caption", {}, text("why_residual")),
        make("thead", {}, make("tr", {}, make("td", {}), ...["p", "q", "p − q"].map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...rows.map(([word, p, q, least, most]) => make("tr", { class: word === string ? "sd-top-this" : null },
          make("th", { scope: "row", dir: "auto" }, visible(word)),
          make("td", {}, show.probability(p)), make("td", {}, show.probability(q)), make("td", {}, range(least, most))))));
    }

    mark(token) {
      if (!token) this.chosen?.classList.remove("sd-chosen");
      else token.classList.add("sd-chosen");
      this.chosen = token;
    }

    // Beside its token, below it or above; on a phone the style puts it at the bottom of the screen.
    place() {
      if (this.element.hidden) return;
      const box = this.anchor?.isConnected ? this.anchor.getClientRects()[0] : null;
      const frame = this.anchor?.closest(".sd-text")?.getBoundingClientRect();
      if (!box || (frame && (box.bottom < frame.top || box.top > frame.bottom))) {
        this.hide();
        return;
      }
      const { width, height } = this.element.getBoundingClientRect();
      const x = Math.min(Math.max(GAP, box.left - 24), innerWidth - width - GAP);
      const below = box.bottom + GAP;
      const above = box.top - GAP - height;
      const y = below + height <= innerHeight - GAP || above < GAP ? Math.min(below, Math.max(GAP, innerHeight - height - GAP)) : above;
      this.element.style.setProperty("--x", `${x}px`);
      this.element.style.setProperty("--y", `${y}px`);
    }

    hide() {
      this.mark(null);
      this.pinned = false;
      this.element.hidden = true;
    }
  }

  specdemo.Why = Why;
})(window.specdemo);
