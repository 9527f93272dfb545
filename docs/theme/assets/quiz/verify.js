/* Grades the ID of a certificate again, and says what it shows. All that was typed or linked is text, never HTML. */
(() => {
  "use strict";

  const root = document.querySelector("[data-verify]");
  if (!root) return;
  const { say } = rematQuiz.progress;
  const part = (name) => root.querySelector(`[data-rq="${name}"]`);
  const field = (name) => root.querySelector(`#rq-${name}`);
  const FIELDS = ["id", "name", "signature", "key"];

  function element(tag, className, ...content) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...content);
    return made;
  }

  const mark = (good, word) => element("span", `rq-mark ${good ? "rq-right" : "rq-wrong"}`, say(word));

  /** What the signature says: null (none given), true or false; an error if it or the key is none at all. */
  function signature(id) {
    const [given, key] = [field("signature").value.trim(), field("key").value.trim()];
    if (!given && !key) return null;
    if (!given) throw new rematQuiz.QuizError("signature");
    if (!key) throw new rematQuiz.QuizError("key");
    return rematQuiz.signed(id, given, key);
  }

  function topics(exam, found) {
    const made = element("div", "rq-graded");
    for (const topic of rematQuiz.data.topics.filter((one) => exam.topics.includes(one.id))) {
      const right = topic.questions.filter((q) => found.questions[q.id]).length;
      const list = element("ul", "rq-reasons");
      for (const q of topic.questions) {
        const good = found.questions[q.id];
        const link = element("a", "", q.prompt);
        link.href = `${topic.id}.html#${q.id}`;
        list.append(element("li", "", mark(good, good ? "right" : "wrong"), " ", link));
      }
      const summary = say("topic_score", { topic: topic.title, right, of: topic.questions.length });
      made.append(element("details", "", element("summary", "", summary), list));
    }
    return made;
  }

  function report(exam, found, signed) {
    const { right, of, day } = found;
    const good = found.passed && found.name !== false && signed !== false;
    const facts = element("dl", "rq-facts");
    const fact = (word, ...content) => facts.append(element("dt", "", say(word)), element("dd", "", ...content));
    fact("fact_exam", exam.title);
    fact("fact_score", mark(found.passed, found.passed ? "passed" : "not_passed"), " ", say("score", { right, of, percent: exam.pass_mark }));
    const names = { true: "name_matches", false: "name_differs", null: "name_not_given" };
    const nameMark = found.name === null ? [] : [mark(found.name, found.name ? "right" : "wrong"), " "];
    fact("fact_name", ...nameMark, say(names[found.name]));
    fact("fact_day", say("day_said", { day }));
    const signatures = { true: "signature_right", false: "signature_wrong", null: "signature_not_given" };
    const signatureMark = signed === null ? [] : [mark(signed, signed ? "right" : "wrong"), " "];
    fact("fact_signature", ...signatureMark, say(signatures[signed]));
    const verdict = element("p", `rq-verdict ${good ? "rq-is-right" : "rq-is-wrong"}`, say(good ? "verified" : "not_verified"));
    return [verdict, facts, element("p", "", say("graded")), topics(exam, found)];
  }

  function verify() {
    const id = field("id").value;
    const name = field("name").value.trim() === "" ? null : field("name").value;
    try {
      const exams = rematQuiz.progress.exams();
      const found = rematQuiz.verify(exams, id, name);
      const exam = exams.find((one) => one.id === found.exam);
      part("result").replaceChildren(...report(exam, found, signature(id)));
    } catch (error) {
      if (!(error instanceof rematQuiz.QuizError)) throw error;
      part("result").replaceChildren(element("p", "rq-verdict rq-is-wrong", say(`error_${error.code}`)));
    }
  }

  /** What a link brings along: verify.html#id=...&name=...; it is not sent to a server. */
  function readLink() {
    const given = new URLSearchParams(location.hash.slice(1));
    if (!given.has("id")) return;
    for (const name of FIELDS) field(name).value = given.get(name) ?? "";
    part("signature").open = given.has("signature") || given.has("key");
    verify();
  }

  part("form").addEventListener("submit", (event) => {
    event.preventDefault();
    verify();
  });
  part("form").addEventListener("input", () => part("result").replaceChildren());
  window.addEventListener("hashchange", readLink);
  readLink();
})();
