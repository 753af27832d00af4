// What a race's log tells, put together round by round, for every part that looks at a race at a moment of its choice.
// Times are seconds of a lane's own engine time. Nothing is computed that the log does not say.
(function (specdemo) {
  "use strict";

  // Index of the first item whose `t` is greater than t.
  const after = (items, t) => {
    let low = 0;
    let high = items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (items[middle].t <= t) low = middle + 1;
      else high = middle;
    }
    return low;
  };

  const FATES = { a: "accepted", r: "rejected", d: "discarded", c: "clipped" };

  class Story {
    constructor(lanes) {
      this.greedy = true;
      this.prompt = "";
      this.recorded = null; // what a recorded race was recorded with
      this.insight = null;
      this.ssd = null; // what a race with SSD teaches besides
      this.projections = []; // what a device for each model would make of it
      // rounds: {n, from, t, s, c, j: [{text, fate}], x: {text, fate} or null, missed, why, cache}; round 0 is the prefill
      this.lanes = Array.from({ length: lanes }, () => ({ records: [], rounds: [], about: null }));
    }

    add(record) {
      if (record.k === "race") Object.assign(this, { greedy: record.greedy, prompt: record.prompt ?? "" });
      if (record.k === "recorded") this.recorded = record;
      if (record.k === "insight" || record.k === "ssd") this[record.k] = record;
      if (record.k === "projection") this.projections.push(record);
      if (record.l === undefined) return;
      const lane = this.lanes[record.l];
      if (record.k === "retold") {
        lane.records = lane.records.filter((known) => known.k === "lane");
        lane.rounds = [];
        return;
      }
      lane.records.push(record);
      const before = lane.rounds.at(-1);
      switch (record.k) {
        case "lane":
          lane.about = record;
          break;
        case "first":
          lane.rounds.push({ n: 0, from: 0, t: record.t, s: record.s, c: 1, j: [], x: { text: record.x, fate: "plain" } });
          break;
        case "round":
          lane.rounds.push({
            n: record.n, from: before ? before.t : 0, t: record.t, s: record.s, c: record.c, missed: before?.cache?.h === false,
            j: record.j.map(([text, fate]) => ({ text, fate: FATES[fate] })),
            x: record.x === undefined ? null : { text: record.x, fate: record.e ?? "plain" },
          });
          break;
        case "why":
        case "cache":
          if (before && before.n === record.n) before[record.k] = record;
          break;
      }
    }

    // Index of the lane that the race is about: the last one that runs.
    get subject() {
      return Math.max(1, this.lanes.findLastIndex((lane) => lane.records.length > 0));
    }

    get duration() {
      return Math.max(0, ...this.lanes.map((lane) => (lane.records.length ? lane.records.at(-1).t : 0)));
    }

    // How many of a lane's records are told by time t.
    told(lane, t) {
      return after(this.lanes[lane].records, t);
    }

    // Index of the last round that is over at time t; -1 before the first.
    roundAt(lane, t) {
      return after(this.lanes[lane].rounds, t) - 1;
    }

    round(lane, n) {
      return this.lanes[lane].rounds.find((round) => round.n === n);
    }
  }

  Object.assign(specdemo, { Story, FATES });
})(window.specdemo);
