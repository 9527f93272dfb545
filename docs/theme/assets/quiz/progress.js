/* What the learner has answered, kept in this browser and shared by all topics and languages. */
rematQuiz.progress = (() => {
  "use strict";

  const KEY = "lightning-remat.quiz.1"; // ends in the version of what is stored
  const questions = new Map(rematQuiz.data.topics.flatMap((topic) => topic.questions.map((q) => [q.id, q])));
  const listeners = [];
  let answers = {}; // question id -> {first, last}
  let stored = true; // whether what is recorded outlives the page

  /** What of a stored text can be used. Damage, and answers to questions that are unknown or have changed, are dropped. */
  function parse(text) {
    const found = {};
    let content = null;
    try {
      content = JSON.parse(text);
    } catch {
      return found;
    }
    const entries = content && typeof content === "object" ? content.answers : null;
    if (!entries || typeof entries !== "object") return found;
    for (const [id, q] of questions) {
      const entry = Object.hasOwn(entries, id) ? entries[id] : null;
      if (!entry || typeof entry !== "object" || entry.digest !== q.digest) continue;
      if (!rematQuiz.isAnswer(q, entry.first) || !rematQuiz.isAnswer(q, entry.last)) continue;
      found[id] = { first: entry.first, last: entry.last };
    }
    return found;
  }

  /** Takes over what is stored: another tab may have written. What only this page knows stays, if it cannot be stored. */
  function load() {
    try {
      const text = localStorage.getItem(KEY);
      if (stored) answers = parse(text);
    } catch {
      stored = false;
    }
  }

  function save() {
    const entries = Object.entries(answers).map(([id, entry]) => [id, { digest: questions.get(id).digest, ...entry }]);
    try {
      localStorage.setItem(KEY, JSON.stringify({ answers: Object.fromEntries(entries) }));
      stored = true;
    } catch {
      stored = false; // forbidden, or full
    }
    for (const listener of listeners) listener();
  }

  /** Whether anything can be stored at all; asked once, so that a page can say so before the first answer. */
  function probe() {
    try {
      localStorage.setItem(`${KEY}.probe`, "1");
      localStorage.removeItem(`${KEY}.probe`);
    } catch {
      stored = false;
    }
  }

  function record(id, answer) {
    load();
    const first = Object.hasOwn(answers, id) ? answers[id].first : answer;
    answers[id] = { first, last: answer };
    save();
  }

  /** Ends the attempt at these questions. */
  function forget(ids) {
    load();
    for (const id of ids) delete answers[id];
    save();
  }

  /** How far a list of questions is. */
  function count(list) {
    const done = list.filter((q) => Object.hasOwn(answers, q.id));
    const rightAt = (which) => done.filter((q) => rematQuiz.isRight(q, answers[q.id][which]));
    const right = rightAt("first").length;
    return { answered: done.length, of: list.length, right, missed: done.filter((q) => !rightAt("last").includes(q)) };
  }

  /** The exams with their questions, as rematQuiz.issue and rematQuiz.verify want them. */
  function exams() {
    return rematQuiz.data.exams.map((exam) => ({
      ...exam,
      questions: exam.topics.flatMap((id) => rematQuiz.data.topics.find((topic) => topic.id === id).questions),
    }));
  }

  /** A text of the page's language with what stands in braces filled in. */
  function say(word, values = {}) {
    return rematQuiz.fill(rematQuiz.data.words[word], values);
  }

  probe();
  load();

  /** Another tab has written, or the browser shows a page again as it was left. */
  function reload() {
    load();
    for (const listener of listeners) listener();
  }

  window.addEventListener("storage", (event) => (event.key === KEY || event.key === null) && reload());
  window.addEventListener("pageshow", (event) => event.persisted && reload());

  return {
    count, exams, forget, record, say,
    get: (id) => (Object.hasOwn(answers, id) ? answers[id] : null),
    all: () => [...questions.values()],
    isStored: () => stored,
    onChange: (listener) => listeners.push(listener),
  };
})();
