// The order of search results: of pages that match alike, those that say how to do a thing come first.
const FOLDERS = { start: 4, howto: 3, tutorials: 2, explanation: 2, reference: 0, results: -4 };
var Scorer = {
  score: ([page, , , , score]) => score + (page === "reference/commands" || page === "reference/modules" ? -2 : FOLDERS[page.split("/")[0]] ?? 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 0, 1: 0, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
