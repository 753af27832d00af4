// One page in several languages: every part that we draw is drawn again when the reader switches, and the words inside
// Gradio's own components are exchanged where they stand. The choice is remembered.
(function (specdemo) {
  "use strict";
  const { make } = specdemo;

  const KEY = "specdemo.language";
  const NAMES = { en: "English", zh: "中文" };
  const TAGS = { en: "en", zh: "zh-CN" };
  const PARTS = "#ask, #settings"; // made by Gradio, in the server's language
  const OURS = "#examples";
  const WORDS = /^(prompt|method|verification|fan_out|fallback|race$|stop$|advanced$)|_(label|info)$/;
  const ATTRIBUTES = ["placeholder", "aria-label", "title"];

  const remembered = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // a file of its own may have no storage
    }
  };

  const first = () => {
    const asked = remembered() ?? document.querySelector('meta[name="specdemo-language"]')?.content ?? navigator.language;
    return Object.keys(specdemo.texts).find((language) => asked.toLowerCase().startsWith(language)) ?? "en";
  };

  const use = (language) => {
    specdemo.language = language;
    specdemo.strings = { ...specdemo.texts.en, ...specdemo.texts[language] };
    document.documentElement.lang = TAGS[language];
  };

  // -- our own parts: mounted again ---------------------------------------------------------------------------------

  const parts = new Set();

  const drawable = (mount, withSwitch) => (root, value, watch, ...more) => {
    let changed = () => {};
    const draw = () => {
      root.replaceChildren();
      mount(root, value, (name, callback) => (changed = callback), ...more);
      if (withSwitch) {
        const head = root.firstElementChild;
        head.append(make("div", { class: "sd-head-side" }, languageSwitch(), head.querySelector(".sd-status")));
      }
    };
    watch("value", () => changed());
    parts.add({ root, draw });
    draw();
  };

  const languageSwitch = () =>
    make("div", { class: "sd-languages", role: "group", "aria-label": specdemo.text("language") },
      ...Object.keys(specdemo.texts).map((language) => {
        const button = make("button",
          { type: "button", class: "sd-language", lang: TAGS[language], "data-language": language, "aria-pressed": String(language === specdemo.language) },
          NAMES[language]);
        button.addEventListener("click", () => specdemo.speak(language));
        return button;
      }));

  // -- Gradio's parts: the same words exchanged -----------------------------------------------------------------------

  const keyOf = new Map(); // a word in any language -> its key
  for (const texts of Object.values(specdemo.texts)) {
    for (const [key, word] of Object.entries(texts)) if (WORDS.test(key)) keyOf.set(word, key);
  }

  const translated = (word) => (keyOf.has(word) ? specdemo.text(keyOf.get(word)) : word);

  const translate = (part) => {
    const walker = document.createTreeWalker(part, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT, {
      acceptNode: (node) => (node.nodeType === Node.ELEMENT_NODE && node.matches(OURS) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT),
    });
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      if (node.nodeType === Node.TEXT_NODE) {
        const word = node.data.trim();
        const other = translated(word);
        if (other !== word) node.data = node.data.replace(word, () => other);
        continue;
      }
      for (const name of ATTRIBUTES) {
        const word = node.getAttribute(name);
        if (word !== null && translated(word) !== word) node.setAttribute(name, translated(word));
      }
    }
  };

  const observer = new MutationObserver(() => document.querySelectorAll(PARTS).forEach(translate));

  // Gradio makes its parts when it pleases, some of them only when they are opened.
  const attend = () => {
    const there = document.querySelectorAll(PARTS);
    if (there.length < PARTS.split(",").length) return void requestAnimationFrame(attend);
    for (const part of there) {
      translate(part);
      observer.observe(part, { childList: true, subtree: true });
    }
  };

  // -- what the server says, in English: the same sentence in the reader's language, where it is known -----------------

  const LONGEST_SENTENCE = 1000;
  const plain = (part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const sentences = Object.entries(specdemo.texts.en)
    .filter(([key]) => /^(said|error|share)_/.test(key))
    .map(([key, sentence]) => {
      const parts = sentence.split(/\{(\w+)\}/).map((part, index) => (index % 2 ? `(?<${part}>.*?)` : plain(part)));
      return [key, new RegExp(`^${parts.join("")}$`, "sui")]; // a sentence may stand inside another one, without its capital
    });

  specdemo.said = (sentence) => {
    if (specdemo.language === "en" || !sentence || sentence.length > LONGEST_SENTENCE) return sentence;
    for (const [key, pattern] of sentences) {
      const found = pattern.exec(sentence);
      if (!found) continue;
      const blanks = Object.entries(found.groups ?? {}).map(([name, words]) => {
        return [name, name === "quote" ? words : specdemo.said(translated(words))]; // a server's own words stay its own
      });
      return specdemo.text(key, Object.fromEntries(blanks));
    }
    const facts = sentence.split("; ");
    const told = facts.length > 1 ? facts.map(specdemo.said) : facts;
    return told.some((fact, index) => fact !== facts[index]) ? told.join("；") : sentence;
  };

  specdemo.speak = (language) => {
    if (language === specdemo.language) return;
    use(language);
    try {
      localStorage.setItem(KEY, language);
    } catch {
      // then it is forgotten
    }
    for (const part of parts) {
      if (part.root.isConnected) part.draw();
      else parts.delete(part);
    }
    document.querySelectorAll(PARTS).forEach(translate);
    document.querySelector(`.sd-language[data-language="${language}"]`)?.focus();
  };

  use(first());
  for (const [name, mount] of Object.entries(specdemo)) {
    if (/^mount[A-Z]/.test(name)) specdemo[name] = drawable(mount, name === "mountHead" || name === "mountKept");
  }
  if (specdemo.mountHead) attend();
})(window.specdemo);
