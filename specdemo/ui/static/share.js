// Keep and share: the run on show as a file, a file back onto the page, a link to the prompt and its settings.
(function (specdemo) {
  "use strict";
  const { make, text } = specdemo;

  const LONGEST_LINK = 6000; // characters; servers and chat programs cut longer ones
  const LARGEST_FILE = 24_000_000;

  const download = (file) => {
    const link = make("a", { href: URL.createObjectURL(new Blob([file.text], { type: file.type })), download: file.name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };

  // value: first {fields: {name: usual value}, ...}; then {file} to save or {note} to tell, as JSON
  specdemo.mountShare = (root, value, watch, act) => {
    const told = make("p", { class: "sd-share-note", role: "status" });
    const say = (sentence, bad = false) => {
      told.textContent = sentence;
      told.classList.toggle("sd-share-bad", bad);
    };
    const button = (key, click) => {
      const element = make("button", { type: "button", class: "sd-small-button", "data-share": key, title: text(`share_${key}_about`) }, text(`share_${key}`));
      element.addEventListener("click", click);
      return element;
    };
    const save = (kind) => () => {
      specdemo.wanted = JSON.stringify({ kind, language: specdemo.language });
      say(text("share_saving"));
      act.save_run();
    };
    const chooser = make("input", { type: "file", accept: ".jsonl,.html,.htm,.json,.txt", hidden: true, "aria-hidden": "true", tabindex: "-1" });
    chooser.addEventListener("change", async () => {
      const [file] = chooser.files;
      chooser.value = "";
      if (!file) return;
      if (file.size > 4 * LARGEST_FILE) return say(text("error_file_size", { limit: LARGEST_FILE / 1_000_000 }), true);
      specdemo.opened = await file.text();
      say(text("share_opening"));
      act.open_run();
    });
    root.append(make("section", { class: "sd-share", "aria-label": text("share") },
      make("span", { class: "sd-share-title" }, text("share")),
      button("html", save("html")),
      button("lines", save("lines")),
      button("open", () => chooser.click()),
      button("link", () => act.copy_link()),
      chooser,
      told));

    const read = () => {
      const answer = JSON.parse(value() || "{}");
      if (answer.fields) specdemo.fields = answer.fields;
      return answer;
    };
    const first = read();
    if (first.note) say(specdemo.said(first.note), true);
    watch("value", () => {
      const answer = read();
      if (answer.file) {
        download(answer.file);
        say(text("share_saved", { name: answer.file.name }));
      } else {
        say(answer.key ? text(answer.key) : specdemo.said(answer.note ?? ""), !answer.good);
      }
    });
    specdemo.sayShared = say;
  };

  // The values of the form, in the order of the fields: only what is not as usual goes into the link.
  specdemo.copyLink = async (...values) => {
    const link = new URL(location.href);
    link.search = "";
    link.hash = "";
    Object.entries(specdemo.fields).forEach(([name, usual], index) => {
      if (String(values[index]) !== String(usual)) link.searchParams.set(name, String(values[index]));
    });
    if (link.href.length > LONGEST_LINK) return specdemo.sayShared(text("share_link_long"), true);
    const done = await specdemo.copy(link.href);
    specdemo.sayShared(done ? text("share_link_copied") : link.href);
  };
})(window.specdemo);
