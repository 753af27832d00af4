// Which models run and what they take: the plan as bars, and, for who sits at the machine, others in their place.
(function (specdemo) {
  "use strict";
  const { make, text } = specdemo;

  const MODELS = ["target_weights", "draft_weights", "target_kv", "draft_kv", "workspace"]; // parts of a bar, as `bars` names them
  const PREVIEW_MS = 250;

  const size = (bytes) => {
    const gib = bytes / 2 ** 30;
    if (gib >= 0.1) return `${gib.toFixed(gib < 10 ? 2 : 1)} GiB`;
    return `${(bytes / 2 ** 20).toFixed(1)} MiB`;
  };

  const precision = (name) => (name === "nf4" ? "NF4" : name);

  // -- a plan as bars: for each device what is taken of all there is, and the models' part of it drawn larger -----------

  const bar = (parts, whole, spoken) =>
    make("div", { class: "sd-memory-bar", role: "img", "aria-label": spoken },
      ...parts.filter(([, bytes]) => bytes > 0).map(([name, bytes]) =>
        make("span", { "data-part": name, style: `flex-grow:${bytes / whole}`, title: `${text(`memory_${name}`)}: ${size(bytes)}` })));

  const legend = (parts) =>
    make("ul", { class: "sd-memory-legend" },
      ...parts.filter(([, bytes]) => bytes > 0).map(([name, bytes]) =>
        make("li", { "data-part": name }, make("span", { class: "sd-memory-key", "aria-hidden": "true" }), text(`memory_${name}`), make("b", {}, size(bytes)))));

  const drawDevice = (device) => {
    const bytes = Object.fromEntries(device.parts.map((part) => [part.name, part.bytes]));
    const models = MODELS.map((name) => [name, bytes[name]]);
    const taken = models.reduce((sum, [, part]) => sum + part, 0);
    const margin = Math.min(device.margin, bytes.free);
    const all = [["models", taken], ["others", bytes.others], ["free", bytes.free - margin], ["margin", margin]];
    const whole = Math.max(device.total, taken + bytes.others);
    const spoken = (parts) => parts.filter(([, part]) => part > 0).map(([name, part]) => `${text(`memory_${name}`)} ${size(part)}`).join(", ");
    const name = device.device === "cpu" ? text("memory_cpu") : device.device;
    return make("div", { class: "sd-memory-device", "data-device": device.device },
      make("p", { class: "sd-memory-title" }, text("memory_device", { device: name, total: size(device.total) })),
      bar(all, whole, spoken(all)), legend(all),
      make("p", { class: "sd-memory-title" }, text("memory_of_it", { taken: size(taken) })),
      bar(models, taken || 1, spoken(models)), legend(models));
  };

  const drawPlan = (plan) => [
    ...plan.bars.map(drawDevice),
    make("p", { class: "sd-memory-reason" }, specdemo.said(plan.reason)),
    ...plan.notes.map((note) => make("p", { class: "sd-memory-note" }, specdemo.said(note))),
    make("p", { class: "sd-memory-note" }, text("memory_context", { n: plan.context.toLocaleString("en") })),
  ];

  // -- the form -----------------------------------------------------------------------------------------------------------

  let choices = { pairs: [], precisions: [] }; // sent once, with the page
  const chosen = { pair: "auto", target: "", drafter: "own", draft: "", precision: "auto" };
  let loading = false;

  const select = (field, options) => {
    const element = make("select", { "data-field": field, "aria-label": text(`models_${field}`) },
      ...options.map(([value, label]) => make("option", { value, selected: value === chosen[field] }, label)));
    element.value = chosen[field];
    return element;
  };

  const input = (field) => {
    const element = make("input", { type: "text", "data-field": field, spellcheck: "false", autocomplete: "off", "aria-label": text(`models_${field}`), placeholder: text("models_name") });
    element.value = chosen[field];
    return element;
  };

  const labelled = (field, element) => make("label", { class: "sd-models-field" }, make("span", {}, text(`models_${field}`)), element);

  specdemo.mountModels = (root, value, watch, act) => {
    const summary = make("span", { class: "sd-models-now" });
    const offer = make("div", { class: "sd-models-offer", role: "alert", hidden: true });
    const now = make("div", { class: "sd-models-plan" });
    const preview = make("div", { class: "sd-models-plan sd-models-preview", hidden: true });
    const note = make("p", { class: "sd-models-note", role: "status" });
    const fill = make("span", { class: "sd-track-fill" });
    const track = make("div", { class: "sd-track sd-models-track", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": text("status_loading") }, fill);
    const doing = make("p", { class: "sd-models-doing" });
    const cancel = make("button", { type: "button", class: "sd-small-button", "data-models": "cancel" }, text("models_cancel"));
    const progress = make("div", { class: "sd-models-progress", hidden: true }, doing, track, cancel);

    const pairs = select("pair", []);
    const fields = {
      pair: pairs,
      target: input("target"),
      drafter: select("drafter", ["own", "none", "other"].map((name) => [name, text(`models_drafter_${name}`)])),
      draft: input("draft"),
      precision: select("precision", []),
    };
    const load = make("button", { type: "button", class: "sd-small-button sd-models-load", "data-models": "load" }, text("models_load"));
    const labels = Object.fromEntries(Object.entries(fields).map(([field, element]) => [field, labelled(field, element)]));
    const form = make("div", { class: "sd-models-form" }, make("h4", {}, text("models_switch")), ...Object.values(labels), load);
    const elsewhere = make("p", { class: "sd-models-elsewhere" }, text("models_elsewhere"));

    const details = make("details", { class: "sd-models", open: specdemo.modelsOpen === true },
      make("summary", {}, make("span", { class: "sd-models-title" }, text("models")), summary),
      make("div", { class: "sd-models-body" },
        make("div", { class: "sd-models-left" }, offer, progress, note, now),
        make("div", { class: "sd-models-right" }, form, elsewhere, preview)));
    details.addEventListener("toggle", () => (specdemo.modelsOpen = details.open));

    const fillChoices = () => {
      const options = [["auto", text("models_pair_auto")],
        ...choices.pairs.map(([name, , , gated]) => [name, gated ? text("models_gated", { name }) : name]), ["other", text("models_pair_other")]];
      pairs.replaceChildren(...options.map(([value, label]) => make("option", { value }, label)));
      pairs.value = chosen.pair;
      fields.precision.replaceChildren(...choices.precisions.map((name) => make("option", { value: name }, text(`models_precision_${name}`))));
      fields.precision.value = chosen.precision;
    };

    const arrange = () => {
      labels.target.hidden = chosen.pair !== "other";
      labels.draft.hidden = chosen.drafter !== "other";
      labels.drafter.hidden = chosen.pair === "auto";
    };

    const ask = (event) => {
      specdemo.wantedModels = JSON.stringify({ ...chosen, drafter: chosen.pair === "auto" ? "own" : chosen.drafter });
      act[event]();
    };

    let waiting = 0;
    const changed = (field) => () => {
      chosen[field] = fields[field].value;
      arrange();
      note.textContent = "";
      preview.hidden = true;
      clearTimeout(waiting);
      const complete = (chosen.pair !== "other" || chosen.target.trim()) && (chosen.drafter !== "other" || chosen.draft.trim());
      if (complete) waiting = setTimeout(() => ask("preview_models"), PREVIEW_MS);
    };
    for (const [field, element] of Object.entries(fields)) element.addEventListener("change", changed(field));
    load.addEventListener("click", () => {
      clearTimeout(waiting);
      preview.hidden = true;
      ask("switch_models");
    });
    cancel.addEventListener("click", () => {
      cancel.disabled = true;
      act.cancel_loading();
    });

    const say = (sentence, bad) => {
      note.textContent = sentence;
      note.classList.toggle("sd-share-bad", bad);
    };

    const offerSmaller = (short, local) => {
      offer.hidden = !short;
      if (!short) return;
      const button = make("button", { type: "button", class: "sd-small-button", "data-models": "smaller" }, text("models_smaller_load"));
      button.addEventListener("click", () => act.load_smaller());
      const words = short.smaller ? text("models_smaller", { plan: specdemo.said(short.smaller) }) : text("models_smallest");
      offer.replaceChildren(make("p", {}, words), ...(short.smaller && local ? [button] : []));
      details.open = true;
    };

    const draw = () => {
      const state = JSON.parse(value() || "{}");
      if (!state.state) return;
      if (state.choices) choices = state.choices;
      if (state.choices || !pairs.options.length) fillChoices();
      const was = loading;
      loading = state.state === "loading";
      progress.hidden = !loading;
      form.inert = loading;
      doing.textContent = specdemo.said(state.message ?? "");
      fill.style.transform = `scaleX(${state.progress ?? 0})`;
      track.setAttribute("aria-valuenow", String(Math.round(100 * (state.progress ?? 0))));
      cancel.hidden = !state.local;
      if (!loading) cancel.disabled = false;
      form.hidden = !state.local;
      elsewhere.hidden = state.local;
      if (state.note) say(specdemo.said(state.note), true);
      else if (was && !loading) say(specdemo.said(state.message), state.state === "failed" || /\. /.test(state.message));
      else if (loading) say("", false);
      if (state.now) {
        const { target, draft } = state.now;
        const models = [`${target} (${precision(state.now.precision)})`, draft ? `${draft.name} (${precision(draft.precision)})` : text("no_draft_model")];
        summary.textContent = `${models.join(" + ")}${state.plan ? ` · ${size(state.plan.total)}` : ""}`;
        now.replaceChildren(...(state.plan ? drawPlan(state.plan) : [make("p", { class: "sd-memory-note" }, text("models_unplanned"))]));
      }
      now.hidden = !state.now;
      if (!state.now) summary.textContent = loading ? specdemo.said(state.message ?? "") : "";
      offerSmaller(state.short, state.local);
      preview.hidden = !state.preview;
      if (state.preview) {
        const title = text(state.preview.fits ? "models_preview" : "models_preview_not", {
          models: [state.preview.target, state.preview.draft ?? text("no_draft_model")].join(" + "),
          precisions: state.preview.precisions.map(precision).join(" + "),
          total: size(state.preview.total),
        });
        preview.classList.toggle("sd-models-over", !state.preview.fits);
        preview.replaceChildren(make("p", { class: "sd-memory-title" }, title), ...drawPlan(state.preview));
      }
    };
    arrange();
    root.append(details);
    draw();
    watch("value", draw);
  };
})(window.specdemo);
