// Code that scrolls can be reached with the keyboard, and captions of the side bar are headings of a level.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll(".highlight pre, .table-wrapper")) code.tabIndex = 0;
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.ariaLevel = "2";
});
