// For a room: large type, and nothing but the race and its big numbers.
(function (specdemo) {
  "use strict";
  const { make, text } = specdemo;

  class Presenter {
    constructor(signal) {
      this.button = make("button", { type: "button", class: "sd-small-button sd-present", title: text("presenter_about") });
      this.label();
      this.button.addEventListener("click", () => this.set(!this.on));
      document.addEventListener("keydown", (event) => event.key === "Escape" && this.on && this.set(false), { signal });
    }

    get on() {
      return document.body.classList.contains("sd-presenter");
    }

    set(on) {
      document.body.classList.toggle("sd-presenter", on);
      this.label();
      scrollTo(0, 0);
    }

    label() {
      this.button.setAttribute("aria-pressed", String(this.on));
      this.button.textContent = text(this.on ? "presenter_leave" : "presenter");
    }
  }

  specdemo.Presenter = Presenter;
})(window.specdemo);
