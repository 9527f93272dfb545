// A word that stands in the text in the singular is found when the plural is typed: it is in the index as its plural as
// well. (The other way round it is found anyway, as the search takes what is typed for a beginning.) Shortening words to
// their stems is no way, for then the beginnings would not be found. docs/hooks.py puts this behind what lunr is in.
(() => {
  const english = (word) => {
    if (/(?:s|x|z|ch|sh)$/.test(word)) return /s$/.test(word) ? null : `${word}es`;
    return /[^aeiou]y$/.test(word) ? `${word.slice(0, -1)}ies` : `${word}s`;
  };
  const spanish = (word) => {
    if (/[sx]$/.test(word)) return null;
    if (/z$/.test(word)) return `${word.slice(0, -1)}ces`;
    if (/[áéíóú]n$/.test(word)) return `${word.slice(0, -2).concat(word.at(-2).normalize("NFD")[0])}nes`;
    return /[aeiouáéó]$/.test(word) ? `${word}s` : `${word}es`;
  };

  /** Has a filter of stop words let through the plural behind each word. */
  const extend = (language, plural) => {
    const filter = language.stopWordFilter;
    const both = (token) => {
      const several = /^\p{L}{3,}$/u.test(`${token}`) ? plural(`${token}`) : null;
      return several === null ? [token] : [token, token.clone(() => several)];
    };
    language.stopWordFilter = (token) => {
      const kept = filter(token);
      if (!kept || typeof kept === "string") return kept; // Material asks about words, too
      return [kept].flat().flatMap(both);
    };
    lunr.Pipeline.registerFunction(language.stopWordFilter, `${filter.label}-plurals`);
  };

  if (lunr.es) extend(lunr.es, spanish);
  else extend(lunr, english);
})();
