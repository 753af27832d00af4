// Whether two texts are the same, and where they part: a line under the lanes.
(function (specdemo) {
  "use strict";
  const { make, text } = specdemo;

  class Same {
    // kind: which lanes are compared, as the records and the texts name it.
    constructor(kind) {
      this.kind = kind;
      this.greedy = undefined;
      this.element = make("div", { class: `sd-${kind}` });
    }

    show(record) {
      this.element.replaceChildren();
      this.element.dataset.same = "";
      if (record === null) {
        if (this.greedy === false) this.verdict("sampled", text("same_sampled"));
        return;
      }
      if (record.at === null) {
        const key = !record.final ? "running" : record.cut ? "prefix" : "final";
        this.verdict("equal", text(`${this.kind}_${key}`, record));
        return;
      }
      const token = (pair) => (pair ? JSON.stringify(pair[1]) : text("same_end_of_text"));
      this.verdict("parted", text(`${this.kind}_parts`, { at: record.at + 1, a: token(record.a), b: token(record.b) }));
      const [a, b] = (record.gaps ?? []).map((gap) => gap?.toFixed(3));
      if (a !== undefined && b !== undefined) this.element.append(" ", text("same_gap", { a, b }));
      this.element.append(" ", text(record.served ? "same_served" : record.numerics ? "same_numerics" : `${this.kind}_bug`));
    }

    verdict(same, sentence) {
      this.element.dataset.same = same;
      this.element.append(sentence);
    }
  }

  specdemo.Same = Same;
})(window.specdemo);
