/* The questions of a topic: checks answers, says what is right and why, keeps count. The page works without it, too. */
(() => {
  "use strict";

  const root = document.querySelector("[data-quiz]");
  if (!root) return;
  const { progress } = rematQuiz;
  const { say } = progress;
  const part = (name, inside = root) => inside.querySelector(`[data-rq="${name}"]`);
  const topic = rematQuiz.data.topics.find((one) => one.id === root.dataset.quiz);
  const shown = new Map(); // question id -> the answer that its feedback is about, as JSON
  let retrying = null; // ids of the questions that are asked again

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text) made.textContent = text;
    return made;
  }

  // ---- one question

  const box = (q) => root.querySelector(`[data-question="${q.id}"]`);
  const inputs = (q) => [...box(q).querySelectorAll("input")];

  /** Reads digits of any script that a keyboard may have; everything that is no whole number in range is null. */
  function toNumber(q, text) {
    const ascii = text.replace(/[\u0966-\u096f]/g, (digit) => digit.charCodeAt(0) - 0x966);
    const clean = ascii.replace(/\u2212/g, "-").trim();
    if (!/^[+-]?[0-9]+$/.test(clean)) return null;
    const number = Number(clean) + 0; // no negative zero
    return rematQuiz.isAnswer(q, number) ? number : null;
  }

  /** The answer in the controls, or null if there is none. */
  function chosen(q) {
    if (q.kind === "number") return toNumber(q, inputs(q)[0].value);
    const ids = inputs(q).filter((input) => input.checked).map((input) => input.value);
    if (!ids.length) return null;
    return q.kind === "single" ? ids[0] : ids;
  }

  function fill(q, answer) {
    for (const input of inputs(q)) {
      if (q.kind === "number") input.value = answer === null ? "" : String(answer);
      else input.checked = answer !== null && [answer].flat().includes(input.value);
    }
  }

  const isEmpty = (q) => inputs(q).every((input) => (q.kind === "number" ? input.value.trim() === "" : !input.checked));

  /** Takes away what was said about an answer that is no longer the one in the controls. */
  function clear(q) {
    shown.delete(q.id);
    part("feedback", box(q)).replaceChildren();
    part("feedback", box(q)).className = "rq-feedback";
    part("more", box(q)).hidden = true;
    part("others", box(q)).hidden = true;
    if (q.kind === "number") inputs(q)[0].removeAttribute("aria-invalid");
  }

  function complain(q) {
    clear(q);
    const [low, high] = q.range ?? [];
    const text = q.kind === "number" ? say("number_first", { low, high }) : say("choose_first");
    part("feedback", box(q)).append(element("p", "rq-verdict", text));
    if (q.kind === "number") inputs(q)[0].setAttribute("aria-invalid", "true");
  }

  /** The reasons of the options that were chosen, and those of the others, both as they stand in the page. */
  function reasons(q, answer) {
    const items = [...part("answer", box(q)).querySelectorAll("li")];
    const right = rematQuiz.isRight(q, answer);
    const isChosen = (item) => {
      if (q.kind !== "number") return [answer].flat().includes(item.dataset.choice);
      return "answer" in item.dataset ? right : item.dataset.near === String(answer);
    };
    const others = items.filter((item) => !isChosen(item));
    return [items.filter(isChosen), q.kind === "number" ? others.filter((item) => "answer" in item.dataset) : others];
  }

  function list(items) {
    const made = element("ul", "rq-reasons");
    made.append(...items.map((item) => item.cloneNode(true)));
    return made;
  }

  /** Says whether an answer is right, and why. */
  function show(q, entry) {
    const answer = entry.last;
    clear(q);
    shown.set(q.id, JSON.stringify(answer));
    const right = rematQuiz.isRight(q, answer);
    const feedback = part("feedback", box(q));
    feedback.classList.add(right ? "rq-is-right" : "rq-is-wrong");
    const verdict = element("p", "rq-verdict");
    verdict.append(element("strong", right ? "rq-right" : "rq-wrong", say(right ? "verdict_right" : "verdict_wrong")));
    const [mine, others] = reasons(q, answer);
    const lacks = q.kind === "several" && q.answer.some((id) => !answer.includes(id));
    if (lacks) verdict.append(` ${say("missing")}`);
    if (q.kind === "number" && !right && !mine.length) verdict.append(` ${say("other_number")}`);
    feedback.append(verdict);
    const made = list(mine);
    // With one option there is no doubt whose reason it is, and whether it is right was just said.
    if (q.kind !== "several") made.querySelectorAll("p:not(.rq-why)").forEach((line) => line.remove());
    if (mine.length) feedback.append(made);
    const firstRight = rematQuiz.isRight(q, entry.first);
    if (firstRight !== right) feedback.append(element("p", "rq-first", say(firstRight ? "first_was_right" : "first_counts")));
    feedback.append(part("explained", box(q)).cloneNode(true));
    part("others", box(q)).replaceChildren(list(others));
    part("more", box(q)).hidden = !others.length;
    part("more", box(q)).firstElementChild.setAttribute("aria-expanded", "false");
  }

  function check(q) {
    const answer = chosen(q);
    if (answer === null) {
      complain(q);
      return;
    }
    shown.set(q.id, JSON.stringify(answer)); // recording tells refresh(), which must not show it a second time
    progress.record(q.id, answer);
    show(q, progress.get(q.id));
  }

  function prepare(q) {
    const one = box(q);
    part("answer", one).hidden = true;
    part("tools", one).hidden = false;
    one.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      check(q);
    });
    one.addEventListener("input", () => clear(q));
    part("more", one).firstElementChild.addEventListener("click", (event) => {
      const open = event.currentTarget.getAttribute("aria-expanded") !== "true";
      event.currentTarget.setAttribute("aria-expanded", String(open));
      part("others", one).hidden = !open;
    });
  }

  // ---- the topic

  function refresh() {
    part("no-storage").hidden = progress.isStored();
    const counts = progress.count(topic.questions);
    part("progress").querySelector("progress").value = counts.answered;
    part("progress-text").textContent = say("counts", counts);
    for (const q of topic.questions) {
      const entry = progress.get(q.id);
      if (entry && retrying === null && shown.get(q.id) !== JSON.stringify(entry.last) && isEmpty(q)) {
        fill(q, entry.last);
        show(q, entry);
      } else if (!entry && shown.has(q.id)) {
        fill(q, null);
        clear(q);
      }
    }
    part("retry").hidden = retrying !== null || !counts.missed.length;
    part("show-all").hidden = retrying === null;
    if (retrying === null) part("result").textContent = counts.answered === counts.of ? say("all_answered", counts) : "";
  }

  function showOnly(ids) {
    retrying = ids;
    for (const q of topic.questions) box(q).hidden = ids !== null && !ids.includes(q.id);
    root.classList.toggle("rq-retrying", ids !== null);
  }

  function retry() {
    const { missed } = progress.count(topic.questions);
    showOnly(missed.map((q) => q.id));
    for (const q of missed) {
      fill(q, null);
      clear(q);
    }
    refresh();
    part("result").textContent = say("retrying", { count: missed.length });
    inputs(missed[0])[0].focus();
  }

  function showAll() {
    showOnly(null);
    refresh(); // shows the last answers to those that were left empty
    inputs(topic.questions[0])[0].focus();
  }

  function startOver() {
    const dialog = part("dialog");
    dialog.returnValue = "no";
    dialog.onclose = () => {
      if (dialog.returnValue !== "yes") return;
      showOnly(null);
      for (const q of topic.questions) {
        fill(q, null);
        clear(q);
      }
      progress.forget(topic.questions.map((q) => q.id));
      part("result").textContent = say("started_over");
      inputs(topic.questions[0])[0].focus();
    };
    dialog.showModal();
  }

  for (const q of topic.questions) prepare(q);
  part("retry").addEventListener("click", retry);
  part("show-all").addEventListener("click", showAll);
  part("start-over").addEventListener("click", startOver);
  progress.onChange(refresh);
  refresh();
  part("progress").hidden = false;
  part("end").hidden = false;
  for (const q of topic.questions) part("feedback", box(q)).setAttribute("role", "status"); // from now on, said aloud
})();
