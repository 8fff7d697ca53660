// Code that scrolls can be reached with the keyboard, captions of the side bar are headings of a level, parameters are
// a list, and the two side bars have names.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll(".highlight pre, .table-wrapper")) code.tabIndex = 0;
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.ariaLevel = "2";
  for (const parameters of document.querySelectorAll(".sig dl")) parameters.role = "list";
  for (const parameter of document.querySelectorAll(".sig dd")) parameter.role = "listitem";
  for (const [bar, name] of [["sidebar", "Pages"], ["toc", "This page"]])
    for (const drawer of document.querySelectorAll(`.${bar}-drawer`)) drawer.ariaLabel = name;
});
