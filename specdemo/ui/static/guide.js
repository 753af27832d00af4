// A short explanation in steps, beside what it explains: one step at a time, and each points at its part of the page.
(function (specdemo) {
  "use strict";
  const { make, text } = specdemo;

  const KEY = "specdemo.guide";
  const POINTS_AT = [
    '[data-lane="standard"]',
    '[data-lane="speculative"]',
    ".sd-legend",
    '[data-lane="speculative"] .sd-stats',
    ".sd-ratio",
    ".sd-same",
    [".sd-cache:not([hidden])", "#settings"], // the choice of the drafter, where the race on show is another one
  ];
  const POINT_MS = 2500;

  const closedBefore = () => {
    try {
      return localStorage.getItem(KEY) === "closed";
    } catch {
      return false; // a browser without storage
    }
  };

  const remember = (open) => {
    try {
      localStorage.setItem(KEY, open ? "open" : "closed");
    } catch {
      // then it is open again next time
    }
  };

  specdemo.mountGuide = (root) => {
    let step = 0;
    const title = make("strong", {});
    const words = make("p", { class: "sd-guide-words", role: "status" });
    const place = make("span", { class: "sd-guide-place" });
    const button = (key, click) => {
      const element = make("button", { type: "button", class: "sd-small-button", "data-guide": key }, text(`guide_${key}`));
      element.addEventListener("click", click);
      return element;
    };
    const back = button("back", () => go(step - 1));
    const next = button("next", () => go(step + 1));
    const show = button("show", () => {
      const part = [POINTS_AT[step]].flat().map((place) => document.querySelector(place)).find(Boolean);
      if (!part) return;
      const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
      part.scrollIntoView({ block: "center", behavior: calm ? "auto" : "smooth" });
      part.classList.add("sd-pointed");
      setTimeout(() => part.classList.remove("sd-pointed"), POINT_MS);
    });
    const go = (to) => {
      step = to;
      title.textContent = text(`guide_${step + 1}_title`);
      words.replaceChildren(title, " ", text(`guide_${step + 1}`));
      place.textContent = text("guide_place", { n: step + 1, all: POINTS_AT.length });
      back.disabled = step === 0;
      next.disabled = step === POINTS_AT.length - 1;
    };
    const details = make("details", { class: "sd-guide", open: !closedBefore() },
      make("summary", {}, text("guide")),
      make("div", { class: "sd-guide-step" }, words, make("div", { class: "sd-guide-keys" }, place, back, next, show)));
    details.addEventListener("toggle", () => remember(details.open));
    go(0);
    root.append(details);
  };
})(window.specdemo);
