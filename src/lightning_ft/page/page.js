"use strict";
// Draws the facts (facts.py), and asks for newer ones if the page is a live one. All that comes from a job is put in as
// text, never as markup.
(() => {
  const PHASES = ["detect", "park", "rebuild", "settle", "catch_up"];
  const STATES = ["running", "parked", "leaving", "expected", "spare", "lost", "left", "ended"];
  const IN_THE_JOB = new Set(["running", "parked", "leaving"]);
  const MAX_SHOWN = 8;
  const POLL_MS = 1000;
  const SVG = "http://www.w3.org/2000/svg";

  const byId = (id) => document.getElementById(id);

  // -- making elements ------------------------------------------------------------------------------------------------

  function make(space, tag, attributes, children) {
    const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }
  const h = (tag, attributes, ...children) => make(null, tag, attributes, children);
  const s = (tag, attributes, ...children) => make(SVG, tag, attributes, children);

  // -- saying numbers -------------------------------------------------------------------------------------------------

  const count = (number) => number.toLocaleString("en-US");
  const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many || `${one}s`}`;
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  /** With no-break spaces. */
  function duration(seconds) {
    if (seconds < 0.0005) return "0\u00a0ms";
    if (seconds < 0.9995) return `${Math.max(1, Math.round(seconds * 1000))}\u00a0ms`;
    if (seconds < 9.95) return `${seconds.toFixed(1)}\u00a0s`;
    if (seconds < 59.5) return `${Math.round(seconds)}\u00a0s`;
    const pair = (large, a, small, b) => `${large}\u00a0${a}${small ? `\u00a0${small}\u00a0${b}` : ""}`;
    const [whole, minutes, hours] = [1, 60, 3600].map((unit) => Math.round(seconds / unit));
    if (whole < 3600) return pair(Math.floor(whole / 60), "min", whole % 60, "s");
    if (minutes < 1440) return pair(Math.floor(minutes / 60), "h", minutes % 60, "min");
    return pair(Math.floor(hours / 24), "d", hours % 24, "h");
  }
  function share(value, digits) {
    if (!isNumber(value)) return "–";
    const places = digits === undefined ? (value > 0.999 && value < 1 ? 3 : value > 0.99 && value < 1 ? 2 : 1) : digits;
    const floor = Math.floor(value * 100 * 10 ** places + 1e-9) / 10 ** places; // 99.999 % is not 100 %
    return `${floor.toFixed(value === 1 ? 0 : places)} %`;
  }
  const two = (number) => String(number).padStart(2, "0");
  function clock(seconds, withDate) {
    const date = new Date(seconds * 1000);
    const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
    return withDate ? `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}` : time;
  }
  const isSameDay = (one, other) => clock(one, true).slice(0, 10) === clock(other, true).slice(0, 10);
  const when = (seconds) => clock(seconds, !isSameDay(seconds, facts.end_s));
  function bytes(number) {
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (number < 1000) return `${number >= 100 || unit === "B" ? Math.round(number) : number.toFixed(1)} ${unit}`;
      number /= 1000;
    }
    return `${number.toFixed(1)} TB`;
  }

  // -- the state of the page ------------------------------------------------------------------------------------------

  let facts = JSON.parse(byId("facts").textContent);
  let heardMs = Date.now();
  let lostMs = null; // since when the coordinator does not answer
  let numShown = MAX_SHOWN;
  let numAnswers = 0;
  const drawn = new Map(); // what each part was last drawn from
  const poll = document.body.dataset.poll;

  /** The coordinator's time now. What a report shows does not grow older. */
  const nowS = () => facts.now_s + (facts.is_live && lostMs === null ? (Date.now() - heardMs) / 1000 : 0);

  /** Draw a part anew if what it shows has changed. */
  function redraw(id, from, draw) {
    const key = JSON.stringify(from);
    if (drawn.get(id) === key) return;
    drawn.set(id, key);
    draw(byId(id));
  }

  // -- verdict and figures --------------------------------------------------------------------------------------------

  function drawVerdict() {
    const { level, title, text, since_s: since } = facts.verdict;
    const box = byId("verdict");
    redraw("verdict", [level, title, text], () => {
      box.className = `verdict ${level}${facts.is_live ? " live" : ""}`;
      box.querySelector("h1").textContent = title;
      box.querySelector(".text").textContent = text;
    });
    const place = box.querySelector(".since");
    place.replaceChildren();
    const isOver = facts.stopped_s !== null;
    if (isNumber(since) && !isOver) place.append(h("b", {}, duration(Math.max(0, nowS() - since))), `since ${when(since)}`);
    else if (isOver && isNumber(facts.started_s))
      place.append(h("b", {}, duration(Math.max(0, facts.stopped_s - facts.started_s))), `from ${clock(facts.started_s, true)}`);
    else if (isNumber(facts.started_s))
      place.append(h("b", {}, duration(Math.max(0, nowS() - facts.started_s))), `since the start, ${when(facts.started_s)}`);
    const mark = { good: "●", warn: "◆", bad: "■", wait: "○", over: "○" }[level] || "";
    document.title = `${mark} ${title} · ${facts.num_members}/${facts.target} · lightning_ft`;
  }

  function figure(name, value, unit, more, level) {
    return h("div", { class: `figure ${level || ""}` },
      h("div", { class: "name" }, name),
      h("div", { class: "value" }, value, unit ? h("small", {}, ` ${unit}`) : null),
      h("div", { class: "more" }, more));
  }

  function drawFigures() {
    const { num_members: num, target, checkpoints } = facts;
    const isOver = facts.stopped_s !== null;
    const spares = facts.members.filter((row) => row.state === "spare").length;
    const last = checkpoints.last;
    const failed = facts.num_failures;
    const slow = facts.recovery_s > 5 ? "warn" : "";
    const cells = [
      isOver
        ? figure("Members", count(facts.ring.length), `of ${count(target)}`, "in the last view")
        : figure("Members", count(num), `of ${count(target)}`, spares ? plural(spares, "spare") : num < target ? `${count(target - num)} missing` : "complete", num < target ? "warn" : ""),
      figure("Step", facts.step === null ? "–" : count(facts.step), "", `generation ${count(facts.generation)}`),
      figure("Goodput", share(facts.goodput), "", isNumber(facts.capacity) ? `${share(facts.capacity)} of members, on average` : "no step is known yet"),
      figure("Failures", count(failed), "", isNumber(facts.recovery_s) ? `${duration(facts.recovery_s)} to recover, on average` : "none", slow),
      figure("Checkpoints", checkpoints.num_saved ? count(checkpoints.num_saved) : "–", "",
        (last ? `the last ${duration(Math.max(0, facts.end_s - last.time_s))} ${isOver ? "before the end" : "ago"}` : "none in the log") +
        (checkpoints.num_failed ? `, ${count(checkpoints.num_failed)} failed` : ""), checkpoints.num_failed ? "warn" : ""),
    ];
    byId("figures").replaceChildren(...cells);
  }

  // -- the ring -------------------------------------------------------------------------------------------------------

  /** Members in the order of ranks; whoever is missing stands behind the last of its host that is there. */
  function inRing() {
    const rows = new Map(facts.members.map((row) => [row.member, row]));
    const found = facts.ring.map((member) => rows.get(member) || { member, state: "expected", host: null });
    const known = new Set(facts.ring);
    const missing = facts.stopped_s === null ? facts.members.filter((row) => !known.has(row.member) && (row.state === "lost" || row.state === "expected")) : [];
    for (const row of missing) {
      const at = found.findLastIndex((other) => other.host === row.host);
      found.splice(at < 0 ? found.length : at + 1, 0, row);
    }
    return found;
  }

  function drawRing() {
    const rows = inRing();
    const look = rows.map((row) => [row.member, row.state, row.rank, row.host]);
    const room = Math.max(240, byId("ring").clientWidth);
    redraw("ring", [look, facts.num_members, facts.target, facts.stopped_s, room], (place) => {
      const num = rows.length;
      const named = num <= 16;
      const single = num <= 64;
      const width = Math.min(named ? 420 : 360, room); // so that text is never scaled
      const radius = Math.min(138, width / 2 - (named ? 68 : 26));
      const height = 2 * (radius + (named ? 52 : 30));
      const [cx, cy] = [width / 2, height / 2];
      const angle = (index) => (index / Math.max(1, num)) * 2 * Math.PI - Math.PI / 2;
      const at = (theta, r) => `${(cx + r * Math.cos(theta)).toFixed(2)} ${(cy + r * Math.sin(theta)).toFixed(2)}`;
      const arc = (from, to, r) => `M ${at(from, r)} A ${r} ${r} 0 ${to - from > Math.PI ? 1 : 0} 1 ${at(to, r)}`;
      const parts = [];
      const size = Math.min(named ? 17 : 14, (Math.PI * radius) / Math.max(2, num) * 0.8);
      if (single) {
        parts.push(s("circle", { class: "link", cx, cy, r: radius }));
        for (let index = 0; index < num && num > 1 && num <= 24; index += 1) {
          const theta = angle(index + 0.5);
          const [c, d] = [Math.cos(theta + Math.PI / 2), Math.sin(theta + Math.PI / 2)];
          const [x, y] = [cx + radius * Math.cos(theta), cy + radius * Math.sin(theta)];
          const points = [[5, 0], [-3.5, 4.2], [-3.5, -4.2]].map(([a, b]) => `${(x + a * c - b * d).toFixed(2)},${(y + a * d + b * c).toFixed(2)}`);
          parts.push(s("polygon", { class: "arrow", points: points.join(" ") }));
        }
      }
      const starts = rows.map((row, index) => index).filter((index) => index === 0 || rows[index].host !== rows[index - 1].host);
      if (starts.length > 1 && starts.length <= 64) {
        starts.forEach((start, nth) => {
          const end = nth + 1 < starts.length ? starts[nth + 1] : num;
          const [from, to] = [angle(start - 0.2), angle(end - 1 + 0.2)];
          parts.push(s("path", { class: "host-arc", d: arc(from, to, radius - (single ? size + 9 : 22)) }, s("title", {}, `${rows[start].host || "host not known"}: ${plural(end - start, "member")}`)));
        });
      }
      const say = (row) => `${row.member}${row.rank === null || row.rank === undefined ? "" : `, rank ${row.rank}`}, ${row.state}${row.host ? `, on ${row.host}` : ""}`;
      if (!single) {
        for (let from = 0, to; from < num; from = to) {
          const first = rows[from];
          const isLike = (row) => num > 256 && row.host === first.host && row.state === first.state;
          for (to = from + 1; to < num && isLike(rows[to]); to += 1);
          const gap = num > 256 ? (to === num || rows[to].host !== first.host ? 0.004 : 0) : 0.22 * (2 * Math.PI / num);
          const text = to - from === 1 ? say(first) : `${first.host || "host not known"}: ${plural(to - from, "member")} ${first.state}`;
          parts.push(s("path", { class: `segment s-${first.state}`, d: arc(angle(from - 0.5) + gap, angle(to - 0.5) - gap, radius) }, s("title", {}, text)));
        }
      }
      for (let index = 0; single && index < num; index += 1) {
        const [row, theta] = [rows[index], angle(index)];
        const [x, y] = [cx + radius * Math.cos(theta), cy + radius * Math.sin(theta)];
        parts.push(s("circle", { class: `node s-${row.state}`, cx: x.toFixed(2), cy: y.toFixed(2), r: size.toFixed(2) }, s("title", {}, say(row))));
        const rank = row.rank ?? (facts.stopped_s !== null && facts.ring.includes(row.member) ? facts.ring.indexOf(row.member) : null);
        if (size >= 9 && rank !== null) parts.push(s("text", { class: "rank", x: x.toFixed(2), y: y.toFixed(2) }, String(rank)));
        if (named) {
          const side = Math.cos(theta);
          const anchor = Math.abs(side) < 0.2 ? "middle" : side < 0 ? "end" : "start";
          const [lx, ly] = [cx + (radius + size + 8) * Math.cos(theta), cy + (radius + size + 11) * Math.sin(theta)];
          parts.push(s("text", { class: `${anchor} ${row.state === "lost" ? "s-lost-text" : ""}`, x: lx.toFixed(2), y: (ly + 4).toFixed(2) }, row.member));
        }
      }
      const isOver = facts.stopped_s !== null;
      const middle = `${count(isOver ? facts.ring.length : facts.num_members)}/${count(facts.target)}`;
      parts.push(s("text", { class: "big", "font-size": middle.length > 7 ? 30 : 40, x: cx, y: cy + 4 }, middle));
      parts.push(s("text", { class: "middle", x: cx, y: cy + 27 }, isOver ? "in the last view" : "members"));
      const label = `Ring of ${plural(facts.ring.length, "member")}`;
      place.replaceChildren(facts.ring.length || num ? s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, ...parts) : h("p", { class: "empty" }, "There is no view yet."));
      const tally = STATES.map((state) => [state, rows.filter((row) => row.state === state).length]).filter(([, n]) => n);
      byId("ring-key").replaceChildren(...tally.map(([state, n]) => h("li", { class: `s-${state}` }, h("span", { class: "dot" }), `${count(n)} ${state}`)));
    });
  }

  // -- goodput over time ----------------------------------------------------------------------------------------------

  /** Goodput at moments, from the first committed step on: the share of the time that lies in no standstill. */
  function goodputCurve(since, end, num) {
    const moments = new Set();
    for (let index = 0; index <= num; index += 1) moments.add(since + ((end - since) * index) / num);
    for (const [first, last] of facts.standstills) moments.add(first).add(last);
    let [lost, nth] = [facts.lost_before_s, 0];
    const points = [];
    for (const moment of [...moments].filter((each) => each > since && each <= end).sort((a, b) => a - b)) {
      while (nth < facts.standstills.length && facts.standstills[nth][1] <= moment) {
        lost += facts.standstills[nth][1] - facts.standstills[nth][0];
        nth += 1;
      }
      const open = nth < facts.standstills.length ? Math.max(0, moment - facts.standstills[nth][0]) : 0;
      points.push([moment, Math.max(0, 1 - (lost + open) / (moment - since))]);
    }
    return points;
  }

  function niceTicks(span, most) {
    const units = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600];
    return units.find((unit) => span / unit <= most) || span / most;
  }

  function drawChart() {
    const place = byId("chart");
    const [since, end] = [facts.trains_since_s, facts.is_live && facts.stopped_s === null ? nowS() : facts.end_s];
    if (since === null || end - since < 0.05) {
      place.replaceChildren(h("p", { class: "empty" }, "Training has not begun."));
      return;
    }
    const width = Math.max(260, place.clientWidth);
    const [left, right, top, strip, foot] = [56, 6, 10, 34, 24];
    const height = Math.max(280, place.clientHeight);
    const middle = height - top - 18 - strip - foot;
    const x = (moment) => left + ((Math.min(Math.max(moment, since), end) - since) / (end - since)) * (width - left - right);
    const points = goodputCurve(since, end, Math.min(240, Math.round(width / 3)));
    const settled = points.filter(([moment]) => moment - since > (end - since) * 0.02);
    const least = Math.min(...(settled.length ? settled : points).map((point) => point[1]));
    const floor = least >= 0.9999 ? 0.99 : [0.9995, 0.999, 0.998, 0.995, 0.99, 0.98, 0.95, 0.9, 0.8, 0.5, 0].find((value) => value < least) ?? 0;
    const y = (value) => top + (1 - (Math.max(value, floor) - floor) / (1 - floor)) * middle;
    const parts = [];
    for (const value of [1, (1 + floor) / 2, floor]) {
      parts.push(s("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
      parts.push(s("text", { class: "end", x: left - 8, y: y(value) + 4 }, `${+(value * 100).toFixed(2)} %`));
    }
    const bottom = top + middle + 18 + strip;
    for (const incident of facts.incidents) {
      const [from, to] = [x(incident.began_s), x(incident.ended_s ?? end)];
      if ((incident.ended_s ?? end) <= since) continue;
      const label = s("title", {}, `${when(incident.began_s)} ${incident.title}: ${duration(incident.duration_s)}`);
      parts.push(s("rect", { class: `band${incident.is_failure ? "" : " calm"}`, x: from - 0.75, width: Math.max(1.5, to - from), y: top, height: bottom - top }));
      parts.push(s("rect", { class: "band-hit", x: from - 5, width: Math.max(11, to - from + 10), y: top, height: bottom - top }, label));
    }
    const line = points.map(([moment, value]) => `${x(moment).toFixed(1)} ${y(value).toFixed(1)}`).join(" L ");
    parts.push(s("path", { class: "area", d: `M ${x(points[0][0]).toFixed(1)} ${top + middle} L ${line} L ${x(end).toFixed(1)} ${top + middle} Z` }));
    parts.push(s("path", { class: "curve", d: `M ${line}` }));
    const most = Math.max(1, ...facts.sizes.map((view) => Math.max(view[1], view[2])));
    const level = (size) => bottom - (size / most) * strip;
    let [steps, edge] = [`M ${left} ${bottom}`, ""];
    facts.sizes.forEach(([moment, size], nth) => {
      const next = nth + 1 < facts.sizes.length ? facts.sizes[nth + 1][0] : end;
      if (next < since) return;
      steps += ` L ${x(moment).toFixed(1)} ${level(size).toFixed(1)} L ${x(next).toFixed(1)} ${level(size).toFixed(1)}`;
      edge += `${edge ? " L" : "M"} ${x(moment).toFixed(1)} ${level(size).toFixed(1)} L ${x(next).toFixed(1)} ${level(size).toFixed(1)}`;
    });
    parts.push(s("path", { class: "size", d: `${steps} L ${x(end).toFixed(1)} ${bottom} Z` }), s("path", { class: "size-edge", d: edge }));
    parts.push(s("text", { class: "end", x: left - 8, y: level(most) + 9 }, count(most)), s("text", { class: "end", x: left - 8, y: bottom }, "0"));
    for (const moment of facts.checkpoints.times_s) {
      if (moment >= since && moment <= end) parts.push(s("line", { class: "tick", x1: x(moment), x2: x(moment), y1: bottom + 1, y2: bottom + 6 }, s("title", {}, `checkpoint at ${when(moment)}`)));
    }
    const unit = niceTicks(end - since, Math.max(2, Math.floor((width - left) / 96)));
    for (let moment = 0; moment <= end - since; moment += unit) {
      const mark = left + (moment / (end - since)) * (width - left - right);
      const anchor = moment === 0 ? "" : mark > width - 30 ? "end" : "middle";
      parts.push(s("text", { class: anchor, x: mark, y: height - 4 }, moment === 0 ? clock(since, true).slice(11) : `+${duration(moment)}`));
    }
    const label = `Goodput is ${share(facts.goodput)}; lowest shown ${share(least)}`;
    place.replaceChildren(s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label }, ...parts));
  }

  // -- incidents ------------------------------------------------------------------------------------------------------

  const phaseName = (name) => name.replace("_", " ");

  function incidentBar(incident) {
    const known = PHASES.filter((name) => isNumber(incident.phases[name]));
    if (!known.length) return [h("div", { class: "bar", role: "img", "aria-label": "goes on" }, h("i", { class: "unknown" }))];
    const bar = h("div", { class: "bar", role: "img", "aria-label": known.map((name) => `${phaseName(name)} ${duration(incident.phases[name])}`).join(", ") });
    const parts = h("ul", { class: "parts" });
    for (const name of known) {
      const seconds = incident.phases[name];
      if (seconds > 0) {
        const piece = h("i", { class: name });
        piece.style.flexGrow = String(seconds / Math.max(1e-9, incident.duration_s));
        bar.append(piece);
      }
      if (seconds >= 0.0005 || known.length === 1) parts.append(h("li", {}, `${phaseName(name)} `, h("b", {}, duration(seconds))));
    }
    return [bar, parts];
  }

  const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
  const sentence = (text) => `${capital(text)}${/[.!?…]$/.test(text) ? "" : "."}`;
  function names(list, most) {
    return list.length > most ? `${list.slice(0, most).join(", ")} and ${count(list.length - most)} more` : list.join(", ");
  }

  function incidentRow(incident) {
    const isOpen = incident.ended_s === null;
    const lost = incident.losses.map((loss) => loss.member);
    const who = names(lost.length ? lost : incident.joined, 6);
    const hosts = [...new Set(incident.losses.map((loss) => loss.host).filter(Boolean))];
    const details = incident.losses.slice(0, 3).map((loss) =>
      sentence(`${lost.length > 1 ? `${loss.member}: ` : ""}${loss.detail || loss.cause}${loss.doing ? `; it last said: ${loss.doing}` : ""}`));
    if (!details.length && incident.reason && !incident.joined.length) details.push(sentence(incident.reason));
    const after = [];
    if (incident.step !== null) after.push(`Training went on in step ${count(incident.step)}${incident.rounds > 1 ? `, after ${incident.rounds} rounds` : ""}.`);
    if (incident.outcome === "stopped") after.push("The job stopped.");
    if (lost.length && isNumber(incident.restored_s)) after.push(`All were there again after ${duration(Math.max(0, incident.restored_s - incident.began_s))}.`);
    return h("article", { class: `incident ${incident.is_failure ? "" : "calm"} ${isOpen ? "open" : ""}` },
      h("div", { class: "when" }, when(incident.began_s)),
      h("div", { class: "what" },
        h("div", { class: "title" }, capital(incident.title), who ? ": " : "", who ? h("span", { class: "who" }, who) : null, hosts.length ? h("span", { class: "host-name" }, ` on ${names(hosts, 3)}`) : null),
        ...details.map((text) => h("div", { class: "detail" }, text)),
        after.length ? h("div", { class: "detail" }, after.join(" ")) : null),
      h("div", { class: "phases" }, ...incidentBar(incident)),
      h("div", { class: "took" }, duration(isOpen ? Math.max(0, nowS() - incident.began_s) : incident.duration_s)));
  }

  function drawIncidents() {
    const shown = facts.incidents.slice(0, numShown);
    const open = shown.length && shown[0].ended_s === null ? Math.floor(nowS()) : 0;
    redraw("incidents", [shown, facts.num_incidents, numShown, open], (place) => {
      place.replaceChildren(...shown.map(incidentRow));
      if (!shown.length) place.append(h("p", { class: "empty" }, "None. Nobody was lost, and nobody joined."));
      if (facts.incidents.length > numShown) {
        const button = h("button", { class: "more-button", type: "button" }, `Show ${count(Math.min(50, facts.incidents.length - numShown))} more of ${count(facts.incidents.length - numShown)}`);
        button.addEventListener("click", () => { numShown += 50; drawIncidents(); });
        place.append(button);
      } else if (facts.num_incidents > facts.incidents.length) {
        place.append(h("p", { class: "empty" }, `${plural(facts.num_incidents - facts.incidents.length, "earlier one")} in the event log.`));
      }
    });
  }

  // -- members --------------------------------------------------------------------------------------------------------

  const boxes = new Map(); // host -> its details element
  const touched = new Set(); // hosts that the reader has opened or closed
  const worst = (rows) => Math.max(...rows.map((row) => (row.state === "lost" ? 2 : row.is_late || row.is_straggler || row.state === "expected" || row.state === "parked" ? 1 : 0)));

  function memberRow(row) {
    const notes = [];
    if (row.is_straggler) notes.push(h("span", { class: "note" }, "holds others up"));
    if (row.is_back) notes.push(h("span", { class: "note" }, "is back, waits to join"));
    const text = row.doing || (IN_THE_JOB.has(row.state) ? "" : row.detail);
    if (text) notes.push(text);
    const said = notes.flatMap((note, nth) => (nth ? [", ", note] : [note]));
    return h("tr", { "data-member": row.member },
      h("td", {}, row.member),
      h("td", { class: "number" }, row.rank === null ? "–" : String(row.rank)),
      h("td", {}, h("span", { class: `state s-${row.state}` }, h("span", { class: "dot" }), row.state)),
      h("td", { class: "number" }, row.step === null ? "–" : count(row.step)),
      facts.is_live ? h("td", { class: `number ${row.is_late ? "late" : ""}` }, row.age_s === null ? "–" : `${duration(row.age_s)} ago`) : null,
      h("td", { class: "number" }, row.restarts ? String(row.restarts) : "–"),
      h("td", { class: "number" }, row.pid === null ? "–" : String(row.pid)),
      h("td", { class: "wide" }, ...said));
  }

  function hostTable(rows) {
    const heads = [["Member"], ["Rank", 1], ["State"], ["Step", 1], facts.is_live ? ["Heard", 1] : null, ["Restarts", 1], ["Process", 1], [facts.is_live ? "Doing" : "Note"]];
    return h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ...heads.filter(Boolean).map(([name, isNumeric]) => h("th", { scope: "col", class: isNumeric ? "number" : "" }, name)))),
      h("tbody", {}, ...rows.map(memberRow))));
  }

  function drawMembers() {
    const hosts = new Map();
    for (const row of facts.members) {
      const name = row.host || `node ${row.member.split("/")[0]}, host not known`;
      if (!hosts.has(name)) hosts.set(name, []);
      hosts.get(name).push(row);
    }
    const filter = byId("filter");
    filter.hidden = facts.members.length <= 16;
    const wanted = filter.hidden ? "" : filter.value.trim().toLowerCase();
    const matches = (row, name) => !wanted || [row.member, row.state, name].some((text) => text.toLowerCase().includes(wanted));
    const place = byId("hosts");
    place.classList.toggle("few", hosts.size <= 4);
    for (const [name, box] of boxes) {
      if (!hosts.has(name)) { box.remove(); boxes.delete(name); }
    }
    const order = [...hosts].sort((one, other) => worst(other[1]) - worst(one[1]));
    let numMatching = 0;
    order.forEach(([name, rows], nth) => {
      let box = boxes.get(name);
      if (!box) {
        box = h("details", { class: "host" }, h("summary", {}, h("span", { class: "name" }, name), h("span", { class: "tally" }), h("span", { class: "dots", "aria-hidden": "true" })));
        box.querySelector("summary").addEventListener("click", () => touched.add(name));
        box.addEventListener("toggle", () => { drawn.delete(`host ${name}`); fillHost(name, box); });
        boxes.set(name, box);
      }
      const matching = rows.filter((row) => matches(row, name));
      numMatching += matching.length;
      box.rows = matching;
      box.hidden = !matching.length;
      if (!touched.has(name)) box.open = facts.members.length <= 16 || (worst(rows) === 2 && nth < 4) || (Boolean(wanted) && numMatching <= 64);
      if (place.children[nth] !== box) place.insertBefore(box, place.children[nth] || null);
      fillHost(name, box);
    });
    const none = !order.length ? "Nobody has come yet." : numMatching ? "" : "No member matches.";
    redraw("hosts-none", none, () => {});
    let note = place.querySelector(".empty");
    if (none && !note) place.append((note = h("p", { class: "empty" })));
    if (note) { note.textContent = none; if (!none) note.remove(); }
  }

  function fillHost(name, box) {
    const rows = box.rows;
    const tally = STATES.map((state) => [state, rows.filter((row) => row.state === state).length]).filter(([, num]) => num);
    const key = JSON.stringify([box.open, box.open ? rows : tally, facts.is_live]);
    if (drawn.get(`host ${name}`) === key) return;
    drawn.set(`host ${name}`, key);
    box.classList.toggle("trouble", rows.some((row) => row.state === "lost"));
    box.querySelector(".tally").textContent = tally.map(([state, num]) => `${count(num)} ${state}`).join(", ");
    box.querySelector(".dots").replaceChildren(...(box.open ? [] : rows.slice(0, 64).map((row) => h("span", { class: `dot s-${row.state}` }))));
    box.querySelector(".scroll")?.remove();
    if (box.open) box.append(hostTable(rows));
  }

  // -- log, foot, and the whole -----------------------------------------------------------------------------------------

  function drawLog() {
    redraw("sentences", facts.sentences.length ? [facts.sentences[0], facts.sentences.length] : [], (place) => {
      place.replaceChildren(...facts.sentences.map(([time, member, generation, level, text]) =>
        h("li", { class: level >= 30 ? "warning" : "" },
          h("span", { class: "when" }, when(time)),
          h("span", { class: "member" }, `${member || "job"} g${generation}`),
          h("span", { class: "said" }, text))));
    });
  }

  function drawFooter() {
    const { num_events: num, num_damaged: damaged, num_unknown: unknown, earlier_runs: earlier } = facts.log;
    const parts = [`${plural(num, "event")} read`];
    if (damaged) parts.push(`${plural(damaged, "damaged line")} left out`);
    if (unknown) parts.push(`${plural(unknown, "event")} of a newer version left out`);
    if (earlier) parts.push(`${plural(earlier, "earlier run")} in the same log`);
    if (!facts.is_live) parts.push(`as of ${clock(facts.now_s, true)}`);
    const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
    byId("footer").textContent = `${parts.join(" · ")} · times are ${zone || "local"}`;
  }

  function drawPulse() {
    const place = byId("pulse");
    const isGone = lostMs !== null;
    place.className = `pulse ${poll ? (isGone ? "gone" : "") : "still"}`;
    place.textContent = !poll ? clock(facts.now_s, true)
      : isGone ? `no answer since ${clock(lostMs / 1000)}: the job has ended, or another node coordinates it now`
      : `live, ${clock(nowS())}`;
  }

  function draw() {
    drawVerdict(); drawFigures(); drawRing(); drawChart(); drawIncidents(); drawMembers(); drawLog(); drawFooter(); drawPulse();
    document.documentElement.dataset.answers = String(numAnswers); // all is drawn, and from which answer
  }

  async function ask() {
    try {
      const answer = await fetch(poll, { cache: "no-store", credentials: "same-origin" });
      if (answer.status === 401) { location.reload(); return; }
      if (!answer.ok) throw new Error(String(answer.status));
      const newer = await answer.json();
      if (newer.version !== facts.version) { location.reload(); return; }
      [facts, heardMs, lostMs] = [newer, Date.now(), null];
      numAnswers += 1;
      draw();
    } catch (error) {
      if (lostMs === null) lostMs = Date.now();
      drawPulse();
    }
  }

  async function pollForever() {
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, lostMs === null ? POLL_MS : 5 * POLL_MS));
      if (!document.hidden) await ask(); // a page that nobody looks at costs the coordinator nothing
    }
  }

  byId("phases").replaceChildren(...PHASES.map((name) => h("li", { class: name }, h("span", { class: "swatch" }), phaseName(name))));
  byId("filter").addEventListener("input", drawMembers);
  window.addEventListener("resize", () => { drawRing(); drawChart(); });
  window.addEventListener("beforeprint", () => { if (facts.members.length <= 64) for (const box of boxes.values()) box.open = true; });
  draw();
  if (poll) pollForever();
})();
