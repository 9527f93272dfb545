// Spanish is often typed without accents: a word that has one is found without it as well. docs/hooks.py puts this behind
// lunr's Spanish, in which only the filter of stop words is used.
(() => {
  const filter = lunr.es.stopWordFilter;
  const plain = (word) => word.normalize("NFD").replace(/\p{M}/gu, "");
  lunr.es.stopWordFilter = (token) => {
    const kept = filter(token);
    return kept && plain(`${kept}`) !== `${kept}` ? [kept, kept.clone(plain)] : kept;
  };
  lunr.Pipeline.registerFunction(lunr.es.stopWordFilter, "stopWordFilter-es-accents");
})();
