// Code that scrolls can be reached with the keyboard, captions of the side bar are headings of a level, and the two
// side bars have names.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll(".highlight pre, .table-wrapper")) code.tabIndex = 0;
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.ariaLevel = "2";
  for (const [bar, name] of [["sidebar", "Pages"], ["toc", "This page"]])
    for (const drawer of document.querySelectorAll(`.${bar}-drawer`)) drawer.ariaLabel = name;
});
