/* How far one is in each exam and, where it is passed, the certificate: made, shown, copied, printed, kept as a file. */
(() => {
  "use strict";

  const root = document.querySelector("[data-certificate]");
  if (!root) return;
  const { progress } = rematQuiz;
  const { say } = progress;
  const exams = progress.exams();
  const section = (exam) => root.querySelector(`[data-exam="${exam.id}"]`);
  const part = (name, inside) => inside.querySelector(`[data-rq="${name}"]`);
  let sheet = null; // what is printed

  // ---- how far one is

  function refresh() {
    part("no-storage", root).hidden = progress.isStored();
    for (const exam of exams) {
      const here = section(exam);
      const counts = progress.count(exam.questions);
      part("bar", here).value = counts.answered;
      part("bar", here).hidden = false;
      part("counts", here).textContent = say("counts", counts);
      const complete = counts.answered === counts.of;
      const passed = complete && rematQuiz.passes(exam, counts.right);
      part("outcome", here).textContent = !complete ? say("exam_open") : say(passed ? "exam_passed" : "exam_failed");
      part("outcome", here).className = passed ? "rq-verdict rq-is-right" : "";
      part("make", here).hidden = !passed;
      if (!passed && !part("made", here).hidden) unmake(here);
      for (const id of exam.topics) {
        const topic = rematQuiz.data.topics.find((one) => one.id === id);
        const item = here.querySelector(`[data-topic="${id}"]`);
        const { answered, of } = progress.count(topic.questions);
        item.hidden = answered === of;
        part("left", item).textContent = say("left", { left: of - answered });
      }
      part("open", here).hidden = complete;
    }
  }

  function unmake(here) {
    part("made", here).hidden = true;
    sheet?.remove();
    sheet = null;
    document.getElementById("rq-print").media = "not all";
  }

  // ---- the certificate

  /** Where it can be verified: a fragment, which no server is sent. */
  function verifyLink(id, name) {
    const address = new URL("verify.html", location.href);
    address.search = "";
    return `${address.href}#id=${encodeURIComponent(id)}&name=${encodeURIComponent(name)}`;
  }

  function make(exam, here) {
    const field = here.querySelector("form input");
    const answers = Object.fromEntries(exam.questions.map((q) => [q.id, progress.get(q.id).first]));
    let name;
    let id;
    let picture;
    try {
      name = rematQuiz.displayName(field.value);
      id = rematQuiz.issue(exam, answers, name);
      const { template, words } = rematQuiz.data.certificate;
      picture = rematQuiz.draw(template, rematQuiz.data.lang, words, exam, id, name, rematQuiz.verify([exam], id));
    } catch (error) {
      if (!(error instanceof rematQuiz.QuizError)) throw error;
      if (!part("made", here).hidden) unmake(here); // it is not for the name that stands there now
      part("trouble", here).textContent = say(`error_${error.code}`);
      field.setAttribute("aria-invalid", "true");
      field.focus();
      return;
    }
    part("trouble", here).textContent = "";
    field.removeAttribute("aria-invalid");
    for (const other of exams) unmake(section(other));
    const link = verifyLink(id, name);
    const source = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(picture)}`;
    const image = part("image", here);
    image.src = source;
    image.alt = say("image", { name, exam: exam.title, id });
    part("id", here).value = id;
    part("link", here).value = link;
    part("open-verify", here).href = link;
    part("download", here).href = source;
    part("said", here).textContent = say("made");
    part("made", here).hidden = false;
    sheet = document.createElement("div");
    sheet.className = "rq-sheet";
    sheet.append(Object.assign(new Image(), { src: source, alt: image.alt }));
    document.body.append(sheet);
    document.getElementById("rq-print").media = "all";
    image.focus();
  }

  async function copy(field, here) {
    field.select();
    let done = false;
    try {
      await navigator.clipboard.writeText(field.value);
      done = true;
    } catch {
      done = document.execCommand("copy"); // over plain http there is no clipboard
    }
    part("said", here).textContent = say(done ? "copied" : "not_copied");
  }

  for (const exam of exams) {
    const here = section(exam);
    part("make", here).addEventListener("submit", (event) => {
      event.preventDefault();
      make(exam, here);
    });
    part("copy-id", here).addEventListener("click", () => copy(part("id", here), here));
    part("copy-link", here).addEventListener("click", () => copy(part("link", here), here));
    part("print", here).addEventListener("click", () => window.print());
  }
  progress.onChange(refresh);
  refresh();
})();
