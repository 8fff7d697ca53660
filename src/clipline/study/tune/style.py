"""The look of the page: that of the report, with what a tuning adds to it."""

STYLE = """
:root {
  --ink: #1b2430; --quiet: #566273; --paper: #ffffff; --card: #f6f8fa; --line: #d5dbe3; --accent: #0b6e8f;
  --red: #a3122a; --red-card: #fdecee; --amber: #7a4b00; --amber-card: #fff6e0; --good: #1d6b34;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e9ef; --quiet: #a0acba; --paper: #14181d; --card: #1d232b; --line: #39434f; --accent: #63c3e3;
    --red: #ff9aa8; --red-card: #431620; --amber: #f3cd84; --amber-card: #392a0b; --good: #7fd197;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1.25rem 1rem 3rem; }
.rates .cell { background: color-mix(in srgb, var(--accent) calc(var(--share) * .45), transparent);
  padding: .5rem .8rem; border: 1px solid var(--line); }
.rates .chosen { outline: 3px solid var(--ink); outline-offset: -3px; font-weight: 700; }
"""
