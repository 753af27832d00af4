// The speculation cache of a round as a small tree: the draft is its trunk, the guesses what the target may write after
// each of its tokens, and behind each guess stands the draft that was made for it. The branch that came true is lit.
(function (specdemo) {
  "use strict";
  const { make, text, show, visible } = specdemo;

  class CacheTree {
    // seek(t): somebody wants to see another round.
    constructor(seek) {
      this.seek = seek;
      this.strip = make("ol", { class: "sd-hits", "aria-label": text("tree_rounds") });
      this.strip.addEventListener("keydown", (event) => this.key(event));
      this.title = make("h3", {});
      this.story = make("p", { class: "sd-cache-story" });
      this.grid = make("div", { class: "sd-tree" });
      this.element = make("section", { class: "sd-card sd-cache", "aria-label": text("tree_label"), hidden: true },
        make("header", { class: "sd-card-head" }, this.title, this.story),
        this.strip,
        make("div", { class: "sd-round-scroll", tabindex: "0", role: "group", "aria-label": text("tree_label") }, this.grid),
        make("p", { class: "sd-fine" }, text("tree_about")));
      this.shown = null;
    }

    // Another race: its rounds as one square each.
    load(story) {
      const { rounds } = story.lanes[story.subject];
      this.shown = null;
      this.element.hidden = !rounds.some((round) => round.cache);
      this.squares = new Map(rounds.filter((round) => round.cache).map((round) => {
        const [kind, sign] = round.cache.h ? ["hit", "✓"] : ["miss", "✗"];
        const label = text("tree_round", { n: round.n, outcome: text(`tree_outcome_${kind}`) });
        const square = make("button", { type: "button", class: `sd-hit sd-hit-${kind}`, "aria-label": label, title: label }, sign);
        square.addEventListener("click", () => this.seek(round.t));
        return [round, square];
      }));
      this.strip.replaceChildren(...[...this.squares.values()].map((square) => make("li", {}, square)));
      this.reach(this.squares.keys().next().value);
    }

    // One stop for the Tab key; from there the arrow keys walk over the rounds.
    reach(round) {
      for (const [other, square] of this.squares) square.tabIndex = other === round ? 0 : -1;
    }

    key(event) {
      const direction = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!direction || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      const squares = [...this.squares.values()];
      const next = squares[squares.indexOf(event.target) + direction];
      next?.click();
      next?.focus();
    }

    show(story, t) {
      if (this.element.hidden) return;
      const { rounds } = story.lanes[story.subject];
      const round = rounds[Math.max(0, story.roundAt(story.subject, t))];
      if (!round || round === this.shown) return;
      this.squares.get(this.shown)?.removeAttribute("aria-current");
      this.squares.get(round)?.setAttribute("aria-current", "step");
      if (this.squares.has(round)) this.reach(round);
      this.shown = round;
      this.title.textContent = text("tree_title", { n: round.n });
      this.story.textContent = this.tell(round);
      this.grid.style.setProperty("--columns", round.j.length + 1);
      this.grid.replaceChildren(...(round.cache ? round.j.concat(null).map((_, kept) => this.column(round, kept)) : []));
    }

    tell(round) {
      const { cache } = round;
      if (!cache) return text("tree_none");
      const [kept, string] = cache.o;
      const blanks = { kept, token: visible(string), guesses: cache.f[kept], rank: cache.r === null ? "" : cache.r + 1 };
      const outcome = cache.h ? "tree_hit" : cache.r === null ? "tree_far" : "tree_miss";
      const time = text(cache.p === "none" ? "tree_before" : "tree_time", { built: show.seconds(cache.b[0]), known: show.seconds(cache.b[1]), hidden: show.percent(cache.d) });
      return `${text(outcome, blanks)} ${time}`;
    }

    // What may come after `kept` tokens of the draft: a piece of the trunk, and the guesses that hang on it.
    column(round, kept) {
      const { cache } = round;
      const reached = kept <= cache.o[0];
      const end = kept === cache.o[0];
      const trunk = kept ? visible(round.j[kept - 1].text) : text("tree_root");
      const guesses = cache.g.filter(([position]) => position === kept);
      const branches = guesses.map(([, string, draft, taken]) => this.branch(string, draft, taken ? "taken" : ""));
      if (end && !cache.h) branches.push(this.branch(cache.o[1], null, "missed"));
      return make("div", { class: "sd-tree-column" },
        make("div", { class: `sd-trunk${reached ? " sd-trunk-kept" : ""}${end ? " sd-trunk-end" : ""}` },
          make("span", { class: "sd-box-text", dir: "auto" }, trunk),
          make("span", { class: "sd-box-note" }, text("tree_kept", { n: kept }))),
        make("ul", { class: "sd-branches" }, ...branches));
    }

    branch(string, draft, state) {
      const note = state === "missed" ? text("tree_missing") : draft ? `→ ${visible(draft)}` : text("tree_unfinished");
      return make("li", { class: `sd-branch${state ? ` sd-branch-${state}` : ""}` },
        make("span", { class: "sd-branch-token", dir: "auto" }, visible(string)),
        state ? make("span", { class: "sd-spoken" }, text(`tree_${state}`)) : null,
        make("span", { class: "sd-branch-draft", dir: "auto" }, note));
    }
  }

  specdemo.CacheTree = CacheTree;
})(window.specdemo);
