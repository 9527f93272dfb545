/* The overview of the quiz: how far one is in each topic and in all of them. */
(() => {
  "use strict";

  const root = document.querySelector("[data-quiz-overview]");
  if (!root) return;
  const { progress } = rematQuiz;
  const { say } = progress;
  const part = (name, inside = root) => inside.querySelector(`[data-rq="${name}"]`);

  function refresh() {
    part("no-storage").hidden = progress.isStored();
    for (const topic of rematQuiz.data.topics) {
      const item = root.querySelector(`[data-topic="${topic.id}"]`);
      const counts = progress.count(topic.questions);
      part("topic-progress", item).value = counts.answered;
      part("topic-progress", item).hidden = false;
      part("topic-text", item).textContent = say("counts", counts);
    }
    const all = progress.count(progress.all());
    part("progress").querySelector("progress").value = all.answered;
    part("progress-text").textContent = say("counts", all);
    part("progress").hidden = false;
  }

  part("start-over").hidden = false;
  part("start-over").addEventListener("click", () => {
    const dialog = part("dialog");
    dialog.returnValue = "no";
    dialog.onclose = () => {
      if (dialog.returnValue !== "yes") return;
      progress.forget(progress.all().map((q) => q.id));
      part("progress-text").textContent = `${say("started_over")} ${part("progress-text").textContent}`;
    };
    dialog.showModal();
  });
  part("progress-text").setAttribute("role", "status");
  progress.onChange(refresh);
  refresh();
})();
