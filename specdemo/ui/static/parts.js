// The page's two small parts: its head with the line that says how the models are, and the picker of example prompts.
(function (specdemo) {
  "use strict";
  const { make, text } = specdemo;

  specdemo.mountHead = (root, value, watch) => {
    const word = make("span", { class: "sd-status-word" });
    const detail = make("span", { class: "sd-status-detail" });
    const bar = make("span", { class: "sd-status-fill" });
    const track = make("span", { class: "sd-status-track", "aria-hidden": "true" }, bar);
    const line = make("div", { class: "sd-status", role: "status" }, make("span", { class: "sd-dot", "aria-hidden": "true" }), word, detail, track);
    root.append(make("header", { class: "sd-head" },
      make("div", {}, make("h1", {}, text("heading")), make("p", {}, text("tagline"))), line));
    const draw = () => {
      const status = JSON.parse(value() || "{}");
      if (!status.state) return;
      line.dataset.state = status.state;
      word.textContent = text(`status_${status.state}`);
      detail.textContent = specdemo.said(status.message ?? "");
      track.hidden = status.progress === null || status.progress === undefined;
      bar.style.transform = `scaleX(${status.progress ?? 0})`;
    };
    draw();
    watch("value", draw);
  };

  // What is chosen in the form decides which of its settings are shown: the style does that.
  specdemo.choose = (method, temperature) => Object.assign(document.body.dataset, { method, sampled: temperature > 0 });

  specdemo.mountPicker = (root, value, watch, pick) => {
    const examples = JSON.parse(value());
    const categories = [...new Set(examples.map((example) => example.category))];
    const list = make("div", { class: "sd-examples" });
    const tabs = categories.map((category) => {
      const tab = make("button", { type: "button", class: "sd-tab", "aria-pressed": "false", "data-category": category }, text(`category_${category}`));
      tab.addEventListener("click", () => choose(category));
      return tab;
    });
    const choose = (category) => {
      tabs.forEach((tab) => tab.setAttribute("aria-pressed", String(tab.dataset.category === category)));
      list.replaceChildren(...examples.filter((example) => example.category === category).map((example) => {
        const label = example.prompt.trim() ? example.prompt.replace(/\s+/g, " ") : text("example_blank");
        const item = make("button", { type: "button", class: "sd-example", "data-id": example.id, title: label, dir: "auto" }, label);
        item.addEventListener("click", () => {
          specdemo.picked = example.prompt;
          pick();
        });
        return item;
      }));
      list.scrollTop = 0;
    };
    root.append(make("div", { class: "sd-tabs", role: "group", "aria-label": text("examples_label") }, ...tabs), list);
    choose(categories[0]);
  };
})(window.specdemo);
