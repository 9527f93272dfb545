/* Certificates, format 1, as lightning_remat/quiz/certificate.py has them, to the bit. No DOM; defines rematQuiz. */
var rematQuiz = (() => {
  "use strict";

  const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
  const VERSION = 1;
  const DIGEST = 5; // bytes of an exam's digest in the body
  const TAG = 5; // bytes of a name's tag
  const HEAD = 1 + DIGEST + 2 + TAG; // what stands before the answers
  const CHECK = 3; // bytes behind the body
  const DAY = 86400000; // milliseconds
  const EPOCH = Date.UTC(2025, 0, 1);
  const SPACES = "\\t\\n\\v\\f\\r \\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\u0085\\u001c-\\u001f";
  // What cannot be seen, as certificate.py's UNSEEN has it: written out, since each browser knows another Unicode.
  const UNSEEN = new RegExp(
    "[\\x00-\\x08\\x0e-\\x1b\\x7f-\\x84\\x86-\\x9f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" +
      "\\u200b-\\u200f\\u202a-\\u202e\\u2060-\\u206f\\u2800\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufff8\\ufffe\\uffff" +
      "\\ud800-\\udfff\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}]",
    "gu",
  );
  const SIGNED = "lightning-remat certificate 1\n";

  /** What is wrong, as a code: mistyped, version, bank, name, answers, day, signature or key. */
  class QuizError extends Error {
    constructor(code) {
      super(code);
      this.code = code;
    }
  }

  const utf8 = (text) => new TextEncoder().encode(text);
  const sha256 = (bytes) => noble.sha256(bytes);
  const same = (a, b) => a.length === b.length && a.every((byte, i) => byte === b[i]);

  // ---- base32 (RFC 4648 without padding), base64url

  function toBase32(bytes) {
    let text = "";
    let held = 0;
    let bits = 0;
    for (const byte of bytes) {
      held = (held << 8) | byte;
      bits += 8;
      while (bits >= 5) {
        bits -= 5;
        text += ALPHABET[held >> bits];
        held &= (1 << bits) - 1;
      }
    }
    return bits ? text + ALPHABET[held << (5 - bits)] : text;
  }

  function fromBase32(text) {
    const bytes = [];
    let held = 0;
    let bits = 0;
    for (const character of text) {
      held = (held << 5) | ALPHABET.indexOf(character);
      bits += 5;
      if (bits >= 8) {
        bits -= 8;
        bytes.push(held >> bits);
        held &= (1 << bits) - 1;
      }
    }
    // Five bits or more left over: a length that no whole number of bytes has. Bits that nothing needs must be zero.
    if (bits >= 5 || held !== 0) throw new QuizError("mistyped");
    return Uint8Array.from(bytes);
  }

  function fromBase64url(text, length, code) {
    const clean = text.replace(/\s/g, "");
    if (!/^[A-Za-z0-9_-]*$/.test(clean) || clean.length % 4 === 1) throw new QuizError(code);
    const raw = atob(clean.replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(raw, (character) => character.charCodeAt(0));
    if (bytes.length !== length || toBase64url(bytes) !== clean) throw new QuizError(code);
    return bytes;
  }

  function toBase64url(bytes) {
    return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
  }

  // ---- exams

  /** The number of answers that can be given to a question, a BigInt. */
  function size(question) {
    if (question.kind === "number") return BigInt(question.range[1]) - BigInt(question.range[0]) + 1n;
    const choices = BigInt(question.choices.length);
    return question.kind === "several" ? 2n ** choices : choices;
  }

  /** An answer's number, from 0 to size - 1, or an error if it is no answer to this question. */
  function toIndex(question, answer) {
    if (question.kind === "number") {
      const [low, high] = question.range;
      if (!Number.isInteger(answer) || answer < low || answer > high) throw new QuizError("answers");
      return BigInt(answer) - BigInt(low);
    }
    const place = (id) => {
      const i = question.choices.indexOf(id);
      if (i < 0) throw new QuizError("answers");
      return BigInt(i);
    };
    if (question.kind === "single") return place(answer);
    if (!Array.isArray(answer)) throw new QuizError("answers");
    return answer.reduce((mask, id) => mask | (1n << place(id)), 0n);
  }

  function fromIndex(question, index) {
    if (question.kind === "number") return Number(index + BigInt(question.range[0]));
    if (question.kind === "single") return question.choices[Number(index)];
    return question.choices.filter((_, i) => (index >> BigInt(i)) & 1n);
  }

  function isRight(question, answer) {
    if (question.kind !== "several") return answer === question.answer;
    return toIndex(question, answer) === toIndex(question, question.answer);
  }

  /** Whether this is an answer that can be given to the question (not whether it is right). */
  function isAnswer(question, answer) {
    try {
      toIndex(question, answer);
      return true;
    } catch {
      return false;
    }
  }

  /** What grading depends on, as text; translations and explanations may change freely. */
  function coreText(exam) {
    const questions = exam.questions.map((q) => {
      const several = q.kind === "several" ? q.choices.filter((id) => q.answer.includes(id)) : q.answer;
      return [q.id, q.kind, q.kind === "number" ? q.range : q.choices, several];
    });
    return JSON.stringify([exam.id, exam.pass_mark, questions]);
  }

  const digest = (exam) => sha256(utf8(coreText(exam))).slice(0, DIGEST);

  /** Bytes that an exam's answers take. */
  function width(exam) {
    const most = exam.questions.reduce((product, q) => product * size(q), 1n) - 1n;
    return Math.max(1, Math.ceil(most.toString(2).length / 8));
  }

  const passes = (exam, right) => right * 100 >= exam.pass_mark * exam.questions.length;

  // ---- names and days

  /** A name as it is compared: case, spaces and what cannot be seen do not matter. */
  function normalName(name) {
    const clean = name.replace(UNSEEN, "").normalize("NFC");
    const words = clean.toLowerCase().normalize("NFC").split(new RegExp(`[${SPACES}]+`)).filter((word) => word !== "");
    if (!words.length) throw new QuizError("name");
    return words.join(" ");
  }

  const nameTag = (name) => sha256(utf8(normalName(name))).slice(0, TAG);

  /** Today where the learner is, as YYYY-MM-DD. */
  function today() {
    const now = new Date();
    return new Date(Date.UTC(now.getFullYear(), now.getMonth(), now.getDate())).toISOString().slice(0, 10);
  }

  function toDays(iso) {
    const days = (Date.parse(`${iso}T00:00:00Z`) - EPOCH) / DAY;
    if (!Number.isInteger(days) || days < 0 || days > 0xffff) throw new QuizError("day");
    return days;
  }

  const fromDays = (days) => new Date(EPOCH + days * DAY).toISOString().slice(0, 10);

  // ---- certificates

  /** The ID of a certificate. `answers`: question id -> answer; all of the exam's must be there. */
  function issue(exam, answers, name, iso = today()) {
    let number = 0n;
    for (const q of exam.questions) {
      if (!Object.hasOwn(answers, q.id)) throw new QuizError("answers");
      number = number * size(q) + toIndex(q, answers[q.id]);
    }
    const days = toDays(iso);
    const body = new Uint8Array(HEAD + width(exam));
    body.set([VERSION]);
    body.set(digest(exam), 1);
    body.set([days >> 8, days & 255], 1 + DIGEST);
    body.set(nameTag(name), 3 + DIGEST);
    for (let i = body.length - 1; i >= HEAD; i -= 1) {
      body[i] = Number(number & 255n);
      number >>= 8n;
    }
    return toBase32([...body, ...sha256(body).slice(0, CHECK)]).match(/.{1,6}/g).join("-");
  }

  /** The bytes of an ID, and those without the check, which is right. */
  function read(text) {
    const plain = text.replace(new RegExp(`[${SPACES}-]`, "g"), "");
    if (!/^[A-Za-z2-7]*$/.test(plain)) throw new QuizError("mistyped"); // before other letters become these in upper case
    const raw = fromBase32(plain.toUpperCase());
    if (raw.length <= HEAD + CHECK) throw new QuizError("mistyped");
    const body = raw.slice(0, -CHECK);
    if (!same(sha256(body).slice(0, CHECK), raw.slice(-CHECK))) throw new QuizError("mistyped");
    return { raw, body };
  }

  /** Grades an ID again. Says which exam, what was right, and whether it was made for this name (null: not asked). */
  function verify(exams, text, name = null) {
    const { body } = read(text);
    if (body[0] !== VERSION) throw new QuizError("version");
    const exam = exams.find((e) => same(digest(e), body.slice(1, 1 + DIGEST)) && width(e) === body.length - HEAD);
    if (!exam) throw new QuizError("bank");
    let number = body.slice(HEAD).reduce((n, byte) => n * 256n + BigInt(byte), 0n);
    const answers = {};
    for (const q of [...exam.questions].reverse()) {
      answers[q.id] = fromIndex(q, number % size(q));
      number /= size(q);
    }
    if (number !== 0n) throw new QuizError("mistyped");
    const graded = exam.questions.map((q) => [q.id, isRight(q, answers[q.id])]);
    const right = graded.filter(([, good]) => good).length;
    return {
      exam: exam.id,
      right,
      of: exam.questions.length,
      passed: passes(exam, right),
      day: fromDays(body[1 + DIGEST] * 256 + body[2 + DIGEST]),
      name: name === null ? null : same(nameTag(name), body.slice(3 + DIGEST, HEAD)),
      answers,
      questions: Object.fromEntries(graded),
    };
  }

  /** Whether an organiser's signature (both texts base64url) is one of this ID under this key. */
  function signed(text, signature, key) {
    const bytes = fromBase64url(signature, 64, "signature");
    const keyBytes = fromBase64url(key, 32, "key");
    return noble.verify(bytes, Uint8Array.from([...utf8(SIGNED), ...read(text).raw]), keyBytes);
  }

  // ---- the picture of a certificate, as lightning_remat/quiz/picture.py draws it

  /** A name as it is written: composed, on one line, without what no XML can hold or turns the direction of writing. */
  function displayName(name) {
    const line = (text) => text.split(new RegExp(`[${SPACES}]+`)).filter((word) => word !== "").join(" ");
    const unprintable = /[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]/gu;
    const shown = line(line(name).replace(unprintable, "").normalize("NFC"));
    normalName(shown); // an error if nothing can be seen of it
    return shown;
  }

  /** How wide a name becomes in bold, at most, in tenths of its size: the fonts are those of whoever shows it. */
  function units(name) {
    const wide = (char) => "MWmw@%".includes(char) || char.codePointAt(0) >= 0x2e80;
    return [...name].reduce((sum, char) => sum + (wide(char) ? 11 : char.toLowerCase() !== char ? 9 : 6), 0);
  }

  /** A text with what stands in braces filled in. */
  function fill(text, values) {
    return text.replace(/\{([a-z_]+)\}/g, (_, place) => values[place]);
  }

  /** The template with its places filled in, as SVG. `found`: what verify() says of the ID; `words`: [certificate]. */
  function draw(template, language, words, exam, id, name, found) {
    const shown = displayName(name);
    const values = {
      language,
      title: words.title,
      exam: exam.title,
      given_to: words.given_to,
      name: shown,
      name_size: Math.max(1, Math.min(120, Math.floor(25920 / units(shown)))),
      score: fill(words.score, found),
      pass_mark: fill(words.pass_mark, { percent: exam.pass_mark }),
      day: fill(words.day, found),
      id_label: words.id,
      id,
      id_size: Math.min(46, Math.floor(3400 / id.length)),
      shows: words.shows,
      shows_not: words.shows_not,
      check: words.check,
    };
    const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
    const escape = (value) => String(value).replace(/[&<>"]/g, (character) => escapes[character]);
    return template.replace(/\{\{([a-z_]+)\}\}/g, (_, place) => escape(values[place]));
  }

  return {
    QuizError, coreText, digest, displayName, draw, fill, fromDays, isAnswer, isRight, issue, nameTag, normalName, passes, read, signed, size,
    toBase32, toBase64url, today, toDays, verify, width,
  };
})();
