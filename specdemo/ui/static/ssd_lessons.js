// What a race with SSD teaches: whether drafting ahead paid against plain speculative decoding, what it cost, how often
// the guesses hit, and what a drafter on a device of its own would give. Every figure comes from the log.
(function (specdemo) {
  "use strict";
  const { make, text, show, Chart, scale } = specdemo;

  const milliseconds = (seconds, digits = 2) => `${(1000 * seconds).toFixed(digits)} ms`;
  const signed = (seconds) => `${seconds < 0 ? "−" : "+"}${milliseconds(Math.abs(seconds))}`;

  const whole = (share) => String(Math.round(100 * share)); // beside an axis that says per cent

  const fact = (key, value, about) =>
    make("div", { class: "sd-fact" }, make("dt", {}, text(key)), make("dd", {}, make("strong", {}, value), about ? ` ${about}` : ""));

  const sentences = ({ against, built_s, known_s, late, misses, hits, overlap }) => {
    if (!against) return [make("span", {}, text("ssd_alone"))];
    const blanks = {
      ratio: show.ratio(against.speedup), saved: milliseconds(Math.abs(against.saved_s)), draft: milliseconds(against.draft_s),
      pass: milliseconds(against.pass_s[0], 1), plain_pass: milliseconds(against.pass_s[1], 1),
      tokens: show.decimal(against.round_tokens[0]), plain_tokens: show.decimal(against.round_tokens[1]),
      built: milliseconds(built_s, 1), known: milliseconds(known_s, 1), late: show.percent(late), misses, rounds: hits + misses,
    };
    const drafting = against.cause === "wait" || against.cause === "misses";
    const cause = against.cause === "verify" ? `verify_${overlap}` : drafting && overlap === "none" ? "before" : against.cause;
    return [
      make("strong", {}, text(`ssd_${against.verdict}`, blanks)), " ",
      text(against.saved_s > 0 ? "ssd_saved" : "ssd_not_saved", blanks), " ",
      against.cause ? text(`ssd_cause_${cause}`, blanks) : text("ssd_cause_none"),
    ];
  };

  const verdict = (ssd) => {
    const { against } = ssd;
    return make("div", { class: "sd-card sd-ssd-card" },
      make("h2", {}, text("ssd_title")),
      make("p", { class: "sd-lesson" }, ...sentences(ssd)),
      make("dl", { class: "sd-facts" },
        fact("ssd_hit_rate", show.share(ssd.hit_rate), text("ssd_hit_rate_of", { hits: ssd.hits, rounds: ssd.hits + ssd.misses })),
        fact("ssd_hidden", show.share(ssd.hidden_share), text(`ssd_overlap_${ssd.overlap}`)),
        fact("ssd_guesses", ssd.guesses.toFixed(1)),
        fact("ssd_built", milliseconds(ssd.built_s, 1), text("ssd_known", { known: milliseconds(ssd.known_s, 1) }))),
      against ? make("p", { class: "sd-fine" }, text("ssd_parts")) : null,
      against ? make("ul", { class: "sd-parts" }, ...Object.entries(against.parts).map(([part, seconds]) =>
        make("li", { "data-part": part, class: seconds > 0 ? "sd-part-cost" : "sd-part-gain" }, `${text(`ssd_part_${part}`)} `, make("strong", {}, signed(seconds))))) : null);
  };

  const hitsByFanOut = (ssd) => {
    const fans = ssd.recall_by_fan_out.map(([fan]) => fan);
    const list = (pairs) => pairs.map(([fan, share]) => `${fan}: ${show.percent(share)}`).join(", ");
    const chart = new Chart(text("chart_hits"), text("chart_hits_about"),
      text("chart_hits_spoken", { recall: list(ssd.recall_by_fan_out), hits: list(ssd.hit_rate_by_fan_out) }),
      { most: fans.length, label: text("axis_fan_out"), ticks: fans.map((_, i) => i + 0.5), name: (tick) => String(fans[tick - 0.5]) },
      { most: 1.1, ticks: [0, 0.5, 1], name: show.percent });
    ssd.recall_by_fan_out.forEach(([, share], i) => chart.bar(i + 0.3, 0.36, share, "predicted", whole(share)));
    for (const [fan, share] of ssd.hit_rate_by_fan_out) {
      if (fans.includes(fan)) chart.bar(fans.indexOf(fan) + 0.7, 0.36, share, "hit", whole(share));
    }
    return chart.element;
  };

  const tokensARound = (ssd) => {
    const bars = [["hit", ssd.tokens_on_hit], ["miss", ssd.tokens_on_miss]].filter(([, tokens]) => tokens !== null);
    const spoken = text("chart_ready_spoken", { list: bars.map(([kind, tokens]) => `${text(`ready_${kind}`)}: ${show.decimal(tokens)}`).join(", ") });
    const chart = new Chart(text("chart_ready"), text("chart_ready_about"), spoken,
      { most: bars.length || 1, label: "", ticks: bars.map((_, i) => i + 0.5), name: (tick) => text(`ready_${bars[tick - 0.5][0]}`) },
      scale(Math.max(0, ...bars.map(([, tokens]) => tokens))));
    bars.forEach(([kind, tokens], i) => chart.bar(i + 0.5, 0.5, tokens, kind, show.decimal(tokens)));
    return chart.element;
  };

  // A calculation, and said to be one: set apart from what was measured.
  const projection = (projections) => {
    const error = show.percent(projections[0].error);
    const shown = projections.filter((one) => one.lanes.length);
    return make("div", { class: "sd-card sd-projection" },
      make("h2", {}, text("projection_title"), " ", make("span", { class: "sd-projected" }, text("projection_label"))),
      make("p", { class: "sd-fine" }, text(shown.length ? "projection_about" : "projection_hidden", { error })),
      make("div", { class: "sd-projections" }, ...shown.map(table)));
  };

  const table = ({ profile, source, lanes }) =>
    make("table", { class: "sd-why-figures", "data-profile": profile },
      make("caption", {}, text(`projection_from_${profile}`, { source })),
      make("thead", {}, make("tr", {}, make("td", {}), ...["devices", "speed", "ratio"].map((key) => make("th", { scope: "col" }, text(`projection_${key}`))))),
      make("tbody", {}, ...lanes.map(([method, speed, ratio, devices]) => make("tr", {},
        make("th", { scope: "row" }, text(`lane_short_${method}`)), ...[show.count(devices), show.speed(speed), show.ratio(ratio)].map((value) => make("td", {}, value))))));

  specdemo.ssdLessons = ({ ssd, projections }) =>
    (ssd ? [verdict(ssd), projections.length ? projection(projections) : null].filter(Boolean) : []);
  specdemo.ssdCharts = (story) => (story.ssd ? [hitsByFanOut(story.ssd), tokensARound(story.ssd)] : []);
})(window.specdemo);
