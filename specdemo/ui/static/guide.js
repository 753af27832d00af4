// A short explanation in steps, beside what it explains: each step can point at its part of the page.
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
  ];
  const POINT_MS = 2500;

  const closedBefore = () => {
    try {
      return localStorage.getItem(KEY) === "closed";
    } catch {
      return false;
    }
  };

  specdemo.mountGuide = (root) => {
    const step = (target, index) => {
      const show = make("button", { type: "button", class: "sd-guide-show" }, text("guide_show"));
      show.addEventListener("click", () => {
        const part = document.querySelector(target);
        if (!part) return;
        const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
        part.scrollIntoView({ block: "center", behavior: calm ? "auto" : "smooth" });
        part.classList.add("sd-pointed");
        setTimeout(() => part.classList.remove("sd-pointed"), POINT_MS);
      });
      return make("li", { class: "sd-guide-step" },
        make("strong", {}, text(`guide_${index + 1}_title`)),
        make("p", {}, text(`guide_${index + 1}`)),
        show);
    };
    const details = make("details", { class: "sd-guide", open: !closedBefore() },
      make("summary", {}, text("guide")),
      make("ol", {}, ...POINTS_AT.map(step)));
    details.addEventListener("toggle", () => {
      try {
        localStorage.setItem(KEY, details.open ? "open" : "closed");
      } catch {
        // then it is open again next time
      }
    });
    root.append(details);
  };
})(window.specdemo);
