"""What the site shows of the bank: complete without JavaScript, in every language, and nothing but text from texts."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import docs.quiz_pages.data
import docs.quiz_pages.faq
import docs.quiz_pages.questions
import docs.quiz_pages.text
from docs.quiz_pages import assets, certificate_html, faq_markdown, quiz_html, verify_html
from docs.quiz_pages.certificates import needed
from lightning_remat.quiz.bank import LANGUAGES, Bank, load_bank, quiz_folder
from lightning_remat.quiz.words import load_words

ROOT = Path(__file__).parents[2]
THEME = ROOT / "docs/theme/assets"
PAGES = ROOT / "docs/site"
TINY = load_bank(ROOT / "tests/quiz/tiny")
MODULES = (docs.quiz_pages.data, docs.quiz_pages.faq, docs.quiz_pages.questions, docs.quiz_pages.text)


def use(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "bank", lambda: bank)


@pytest.fixture(autouse=True)
def _tiny_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    use(TINY, monkeypatch)


class Page(HTMLParser):
    """What a page consists of: elements with their attributes, and the text in each of them that is open."""

    VOID = frozenset({"input", "link", "img", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[int, str] = {}
        self._open: list[int] = []
        self.feed(html)
        self.close()
        assert not self._open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for index in self._open:
            self.text[index] = self.text.get(index, "") + data

    def texts(self, tag: str) -> list[str]:
        return [self.text.get(i, "").strip() for i, (name, _) in enumerate(self.elements) if name == tag]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def plain(markdown: str) -> str:
    return re.sub("[`*]", "", markdown)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("topic", TINY.topics, ids=lambda topic: topic.id)
def test_questions_can_be_read_and_looked_up_without_a_script(topic, language: str) -> None:
    page = Page(quiz_html(topic.id, language))
    assert [heading["id"] for heading in page.all("h2")] == [question.id for question in topic.questions]
    folded = page.texts("details")
    for question, text, heading in zip(topic.questions, folded, page.texts("h2"), strict=True):
        assert plain(question.prompt[language]) in heading
        for choice in question.choices:
            assert plain(choice.text[language]) in text
            assert plain(choice.why[language]) in text
        for part in [question.why, *(near.why for near in question.near)]:
            assert part is None or plain(part[language]) in text
        assert question.kind != "number" or str(question.answer) in text
    links = [link["href"] for link in page.all("a")]
    for question in topic.questions:
        assert f"../{question.page.removesuffix('.md')}.html#{question.anchor}" in links


@pytest.mark.parametrize(
    "make", [lambda: quiz_html("sums", "en"), lambda: certificate_html("hi"), lambda: verify_html("es")]
)
def test_every_control_has_a_label_and_every_id_is_there_once(make) -> None:
    page = Page(make())
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert not [id for id, times in Counter(ids).items() if times > 1]
    labelled = {label["for"] for label in page.all("label") if "for" in label}
    assert labelled <= set(ids)
    for control in page.all("input"):
        assert control["type"] in ("radio", "checkbox") or control["id"] in labelled
    for attribute in ("aria-labelledby", "aria-describedby", "aria-controls"):
        for _, attributes in page.elements:
            assert attribute not in attributes or attributes[attribute] in ids


def test_a_choice_of_one_is_radio_buttons_and_of_several_check_boxes() -> None:
    html = quiz_html("sums", "en")
    kinds = Counter(control["type"] for control in Page(html).all("input"))
    several = len(TINY.question("which-are-even").choices)
    assert kinds == {"radio": 2, "checkbox": several, "text": 1}
    assert "from 0 to 10 (apples)" in html
    assert 'class="highlight"' in html


def test_texts_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "<img src=x onerror=alert(1)> `</script>` *so*"
    topic = TINY.topic("sums")
    question = replace(topic.questions[1], prompt=dict.fromkeys(LANGUAGES, evil))
    bad = replace(TINY, topics=(replace(topic, questions=(question,)), TINY.topic("letters")))
    use(bad, monkeypatch)
    html = quiz_html("sums", "en")
    assert not Page(html).all("img")
    assert "<em>so</em>" in html
    script = assets("en")["assets/quiz/data.js"].decode()
    assert "<" not in script
    data = json.loads(script.removeprefix("rematQuiz.data = ").rstrip(";\n"))
    assert data["topics"][0]["questions"][0]["prompt"] == "<img src=x onerror=alert(1)> </script> so"


def test_an_unknown_topic_or_language_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"the quiz has no topic .*; it has sums, letters, and index"):
        quiz_html("cooking", "en")
    with pytest.raises(ValueError, match="'fr' is not a language"):
        quiz_html("sums", "fr")


def test_a_link_to_an_explanation_is_named_by_its_heading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "es/tutorials/sums.md"
    page.parent.mkdir(parents=True)
    page.write_text("# Sumas\n\n## Sumar con `+` {#adding .x}\n\n## Imprimir {#printing}\n", encoding="utf-8")
    monkeypatch.setattr(docs.quiz_pages.text, "PAGES", tmp_path)
    links = Page(quiz_html("sums", "es")).texts("a")
    assert links[:3] == ["Sumar con +", "Imprimir", "Sumar con +"]
    assert Page(quiz_html("sums", "en")).texts("a")[0] == "the page about it"


@pytest.mark.parametrize("language", LANGUAGES)
def test_frequent_questions_have_their_answers(language: str) -> None:
    markdown = faq_markdown(language)
    frequent = [question for question in TINY.questions if question.faq]
    assert re.findall(r"^### .*\{#(.*)\}$", markdown, re.MULTILINE) == [question.id for question in frequent]
    sums = TINY.question("two-and-two")
    assert sums.unit is not None
    assert sums.why is not None
    assert f"**4 {sums.unit[language]}.** {sums.why[language]}" in markdown
    assert "](tutorials/sums.md#adding)" in markdown


def test_frequent_questions_with_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = TINY.topic("sums")
    use(
        replace(TINY, topics=(replace(topic, questions=tuple(replace(q, faq=True) for q in topic.questions)),)),
        monkeypatch,
    )
    markdown = faq_markdown("en")
    assert "```python\nx = [1, 2]\n```" in markdown
    assert "**`[1, 2, 1, 2]`.** A list is repeated." in markdown
    even = TINY.question("which-are-even")
    assert isinstance(even.answer, tuple)
    for choice in even.choices:
        assert (f"- **{choice.text['en']}" in markdown) == (choice.id in even.answer)


def test_the_scripts_know_what_grading_depends_on_and_no_more_changes_a_digest() -> None:
    question = TINY.question("which-are-even")
    assert docs.quiz_pages.data.core(question) == {
        "id": "which-are-even",
        "kind": "several",
        "choices": [choice.id for choice in question.choices],
        "answer": list(question.answer),  # type: ignore[arg-type]  # it is a tuple: the kind is "several"
    }
    before = docs.quiz_pages.data.digest(question)
    assert docs.quiz_pages.data.digest(replace(question, prompt=dict.fromkeys(LANGUAGES, "Else"))) == before
    assert docs.quiz_pages.data.digest(replace(question, answer=("two",))) != before
    assert docs.quiz_pages.data.digest(replace(question, choices=question.choices[::-1])) != before


@pytest.mark.parametrize(("questions", "least"), [(10, 8), (6, 5), (27, 22), (1, 1)])
def test_how_many_must_be_right(questions: int, least: int) -> None:
    assert needed(questions, 80) == least
    assert least * 100 >= 80 * questions > (least - 1) * 100


def test_every_word_is_there_and_used() -> None:
    templates = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/quiz_pages").rglob("*.[hp][ty]*"))
    scripts = "".join(path.read_text(encoding="utf-8") for path in (THEME / "quiz").glob("*.js"))
    known = docs.quiz_pages.text.words("en").keys()
    used = set(re.findall(r"words\.([a-z_]+)", templates)) | set(re.findall(r'words\(lang\)\["([a-z_]+)"\]', templates))
    used |= set(re.findall(r"""words\(lang\)\['([a-z_]+)'\]""", templates))
    assert used <= known
    texts = set(re.findall(r'"([a-z_]+)"', scripts))
    unused = {word for word in known - used - texts if not word.startswith("error_")}
    # What the terminal alone needs of the shared ones.
    assert unused <= load_words()["shared"].keys()
    codes = set(re.findall(r'QuizError\("([a-z]+)"\)|, "(signature|key)"\)', scripts))
    for code in {one or other for one, other in codes} - {"answers"}:  # which no page lets anybody meet
        assert f"error_{code}" in known


def test_what_is_vendored_is_what_its_note_says() -> None:
    pinned = "7f19fb0fd2c6dc1ed179e3ede9f6beb2aafcb72fe0ada827b9327e625d389e67"
    assert hashlib.sha256((THEME / "vendor/noble.js").read_bytes()).hexdigest() == pinned
    assert pinned in (THEME / "vendor/README.md").read_text(encoding="utf-8")
    assert "MIT" in (THEME / "vendor/noble.LICENSE.txt").read_text(encoding="utf-8")


def test_scripts_put_no_text_in_as_html_and_ask_nobody() -> None:
    for path in (THEME / "quiz").glob("*.js"):
        script = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script), (
            path
        )
        assert not re.search(r"https?://|fetch\(|XMLHttpRequest|import\(", script), path
        assert len(script.splitlines()) <= 400


def headings(text: str) -> list[str]:
    return re.findall(r"^##+ .*\{#([\w-]+)\}$", text, re.MULTILINE)


def test_the_pages_are_the_same_in_every_language() -> None:
    names = {path.relative_to(PAGES / "en") for path in (PAGES / "en/quiz").glob("*.md")} | {Path("faq.md")}
    for language in LANGUAGES:
        assert {path.relative_to(PAGES / language) for path in (PAGES / language / "quiz").glob("*.md")} | {
            Path("faq.md")
        } == names
    for name in names:
        texts = [(PAGES / language / name).read_text(encoding="utf-8") for language in LANGUAGES]
        marks = [re.findall("<!-- .* -->", text) for text in texts]
        assert marks[0] == marks[1] == marks[2]
        assert len(marks[0]) == 1
        assert headings(texts[0]) == headings(texts[1]) == headings(texts[2])
        for text in texts:
            assert len(re.findall(r"^##+ ", text, re.MULTILINE)) == len(headings(text)), "every heading has an id"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_topic_has_its_page(language: str) -> None:
    for topic in load_bank(quiz_folder(), answers=False).topics:
        text = (PAGES / language / f"quiz/{topic.id}.md").read_text(encoding="utf-8")
        assert text.splitlines()[0].endswith(f": {topic.title[language]}")
        assert f"[{topic.title[language]}](../{topic.page})" in text
        assert f"<!-- quiz: {topic.id} -->" in text
