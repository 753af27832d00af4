// The head of a run that was kept as one file: what it is, and the prompt that it answers.
(function (specdemo) {
  "use strict";
  const { make, text } = specdemo;

  specdemo.mountKept = (root, value) => {
    const { prompt } = JSON.parse(value());
    root.append(make("header", { class: "sd-head" },
      make("div", {},
        make("h1", {}, text("heading")),
        make("p", {}, text("kept_about")),
        prompt ? make("blockquote", { class: "sd-kept-prompt", dir: "auto", "aria-label": text("prompt_label") }, prompt) : null)));
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const light = () => document.documentElement.classList.toggle("dark", dark.matches);
    dark.addEventListener("change", light);
    light();
  };
})(window.specdemo);
