// What a race teaches, once it is over: a verdict in a sentence, what held it back, and its numbers as pictures.
(function (specdemo) {
  "use strict";
  const { make, text, show, Chart, scale } = specdemo;

  const LANES = ["standard", "speculative", "ssd"];

  class Lessons {
    // raceWith(draftLength): race again with another K; null where there is no server to do it.
    constructor(raceWith) {
      this.raceWith = raceWith;
      this.element = make("section", { class: "sd-lessons", "aria-label": text("lessons_label") });
    }

    show(story) {
      const { insight, ssd } = story;
      this.element.replaceChildren();
      // the theory, and what it predicts, are of drafting that takes its turn
      const inTurns = insight && !ssd ? [this.best(insight), insight.curve && this.theory(insight)] : [];
      const charts = [
        insight && this.progress(story), ...inTurns, ...specdemo.ssdCharts(story), insight && this.histogram(insight), insight && this.positions(insight),
      ].filter(Boolean);
      const verdicts = [insight && this.verdict(insight), ...specdemo.ssdLessons(story)].filter(Boolean);
      if (verdicts.length) this.element.append(...verdicts, make("div", { class: "sd-charts" }, ...charts));
    }

    verdict(insight) {
      const { round, shares } = insight;
      const pays = insight.speedup >= 1 ? "lesson_pays" : "lesson_costs";
      const names = Object.keys(shares).filter((name) => shares[name] > 0);
      const blanks = {
        drafted: round.drafted.toFixed(1), kept: round.kept.toFixed(1), k: insight.draft_length.toFixed(insight.draft_length % 1 ? 1 : 0),
        positions: (insight.draft_length + 1).toFixed(insight.draft_length % 1 ? 1 : 0), v: insight.verify_cost.toFixed(2), c: insight.cost_ratio.toFixed(2),
        none: show.percent(1 - round.drafting),
      };
      return make("div", { class: "sd-card sd-verdict-card" },
        make("h2", {}, text("lessons_title")),
        make("p", { class: "sd-lesson" }, make("strong", {}, text(pays, { speedup: show.ratio(insight.speedup) })), " ",
          insight.limit ? text(`limit_${insight.limit}`, blanks) : text("limit_none")),
        make("div", { class: "sd-losses", "aria-hidden": "true" },
          ...names.map((name) => make("span", { class: `sd-loss sd-loss-${name}`, style: `flex-grow: ${shares[name]}` }))),
        make("ul", { class: "sd-loss-legend" }, ...names.map((name) =>
          make("li", {}, make("span", { class: `sd-swatch sd-loss-${name}`, "aria-hidden": "true" }), `${text(`loss_${name}`)} ${show.percent(shares[name])}`))),
        make("p", { class: "sd-fine" }, text("losses_about", blanks)));
    }

    progress(story) {
      const lanes = story.lanes.map((lane) => lane.rounds);
      const most = Math.max(...lanes.map((rounds) => rounds.at(-1)?.c ?? 0));
      const spoken = text("chart_progress_spoken", { list: lanes.flatMap((rounds, index) =>
        (rounds.length ? `${text(`lane_${LANES[index]}`)} ${show.seconds(rounds.at(-1).t)}` : [])).join(", ") });
      const chart = new Chart(text("chart_progress"), text("chart_progress_about"), spoken,
        { most: story.duration, label: text("axis_time") }, scale(most), true);
      lanes.forEach((rounds, index) => {
        // tokens arrive at the end of their round, all at once
        const steps = rounds.flatMap((round, i) => [[round.t, rounds[i - 1]?.c ?? 0], [round.t, round.c]]);
        if (rounds.length) chart.line([[0, 0], ...steps], LANES[index]);
      });
      return chart.element;
    }

    histogram(insight) {
      const counts = insight.histogram;
      const spoken = text("chart_histogram_spoken", { list: counts.map((count, kept) => `${kept}: ${count}`).join(", ") });
      const chart = new Chart(text("chart_histogram"), text("chart_histogram_about"), spoken,
        { most: counts.length, label: text("axis_kept"), ticks: [...counts.keys()].map((i) => i + 0.5), name: (tick) => String(tick - 0.5) },
        scale(Math.max(...counts)));
      counts.forEach((count, kept) => chart.bar(kept + 0.5, 0.7, count, "speculative", count ? String(count) : ""));
      return chart.element;
    }

    positions(insight) {
      const shares = insight.positions;
      const spoken = text("chart_positions_spoken", { list: shares.map((share, i) => `${i + 1}: ${show.percent(share)}`).join(", ") });
      const chart = new Chart(text("chart_positions"), text("chart_positions_about"), spoken,
        { most: shares.length || 1, label: text("axis_position"), ticks: [...shares.keys()].map((i) => i + 0.5), name: (tick) => String(tick + 0.5) },
        { most: 1.1, ticks: [0, 0.5, 1], name: show.percent });
      shares.forEach((share, i) => chart.bar(i + 0.5, 0.7, share, "speculative", shares.length <= 8 ? show.percent(share) : ""));
      return chart.element;
    }

    theory(insight) {
      const blanks = { a: insight.alpha.toFixed(2), c: insight.cost_ratio.toFixed(2), v: insight.verify_cost.toFixed(2), k: insight.draft_length.toFixed(1), theory: show.ratio(insight.theory), speedup: show.ratio(insight.speedup) };
      const chart = new Chart(text("chart_theory"), text("chart_theory_about", blanks), text("chart_theory_spoken", blanks),
        { most: 1, label: text("axis_alpha"), ticks: [0, 0.25, 0.5, 0.75, 1] },
        { ...scale(Math.max(insight.speedup, insight.curve.at(-1)[1])), name: (tick) => `${tick}×` });
      chart.level(1, "even");
      chart.line(insight.curve, "theory");
      chart.point(insight.alpha, insight.speedup, "measured", text("point_measured", blanks), insight.alpha > 0.6 ? "end" : "start");
      return chart.element;
    }

    best(insight) {
      const points = insight.predicted;
      const top = points.find(([k]) => k === insight.best);
      const blanks = { best: insight.best, speedup: show.ratio(top[1]), used: insight.draft_length.toFixed(insight.draft_length % 1 ? 1 : 0), measured: show.ratio(insight.speedup) };
      const chart = new Chart(text("chart_best"), text("chart_best_about"), text("chart_best_spoken", blanks),
        { most: points.length, label: text("axis_k"), ticks: points.map(([k]) => k + 0.5).filter((_, i) => i % 2 === 0), name: (tick) => String(tick - 0.5) },
        { ...scale(Math.max(insight.speedup, top[1])), name: (tick) => `${tick}×` });
      for (const [k, speedup] of points) chart.bar(k + 0.5, 0.72, speedup, k === insight.best ? "best" : "predicted");
      chart.level(1, "even");
      chart.point(insight.draft_length + 0.5, insight.speedup, "measured", text("point_measured", { speedup: blanks.measured }), insight.draft_length > 10 ? "end" : "start");
      const word = text(insight.best ? "best_k" : "best_none", blanks);
      chart.element.append(make("p", { class: "sd-best" }, make("span", {}, word), this.button(insight)));
      return chart.element;
    }

    button(insight) {
      if (!this.raceWith || !insight.best) return null;
      const button = make("button", { type: "button", class: "sd-small-button sd-race-best" }, text("race_best", { best: insight.best }));
      button.addEventListener("click", () => this.raceWith(insight.best));
      return button;
    }
  }

  specdemo.Lessons = Lessons;
})(window.specdemo);
