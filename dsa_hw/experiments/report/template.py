"""The page around the content: one style sheet, no scripts, nothing to load."""

# ruff: noqa: E501  (a style sheet reads best with a rule per line)

from __future__ import annotations

__all__ = ["PAGE"]

# $ fields are filled by string.Template; every value that came from outside is escaped before.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root {
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
  --ink: #1f2933; --muted: #5f6c7b; --line: #e1e6eb; --paper: #ffffff; --wash: #f6f8fa;
  --latency: #0072b2; --flops: #c95400; --params: #00805d; --memory: #a3467b; --energy: #8a6200; --estimated_energy: #2f6f9f; --good: #00734f; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6ebf0; --muted: #9aa7b4; --line: #2d3742; --paper: #12171d; --wash: #1a2129;
    --latency: #5cb3e8; --flops: #f28e4b; --params: #4cc9a0; --memory: #dd8fbb; --energy: #e3b341; --estimated_energy: #8fc3ea; --good: #57d3a4; --bad: #ff8a80;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.6 var(--sans); }
main { max-width: 70rem; margin: 0 auto; padding: 4rem 1.5rem 5rem; }
header { margin-bottom: 2.5rem; }
.eyebrow { margin: 0 0 .9rem; color: var(--muted); font-size: .875rem; letter-spacing: .01em; overflow-wrap: anywhere; }
h1 { margin: 0 0 1rem; max-width: 52rem; font-size: clamp(1.5rem, 1.1rem + 2vw, 2.25rem); line-height: 1.22; font-weight: 650; letter-spacing: -.015em; text-wrap: balance; }
h2 { margin: 3.5rem 0 .5rem; font-size: 1.25rem; line-height: 1.3; font-weight: 650; letter-spacing: -.01em; }
h3 { margin: 0 0 .35rem; font-size: 1rem; font-weight: 650; }
p { margin: 0 0 .9rem; max-width: 44rem; }
.lede { color: var(--muted); font-size: 1.0625rem; }
.note { color: var(--muted); font-size: .9375rem; }
.warn { border-left: 3px solid var(--flops); padding: .2rem 0 .2rem .9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: 1px; margin: 2rem 0 0; padding: 0; list-style: none; background: var(--line); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.cards li { background: var(--paper); padding: 1.1rem 1.25rem 1.15rem; }
.cards .label { display: flex; align-items: center; gap: .5rem; color: var(--muted); font-size: .8125rem; }
.cards .value { display: block; margin: .15rem 0 .1rem; font-size: 1.5rem; line-height: 1.3; font-weight: 600; letter-spacing: -.01em; font-variant-numeric: tabular-nums; }
.cards .more { display: block; color: var(--muted); font-size: .8125rem; line-height: 1.45; font-variant-numeric: tabular-nums; }
.dot { flex: none; display: inline-block; width: .6em; height: .6em; border-radius: 50%; background: var(--ink); }
.dot.latency { background: var(--latency); } .dot.flops { background: var(--flops); }
.dot.params { background: var(--params); } .dot.memory { background: var(--memory); }
.dot.energy { background: var(--energy); } .dot.estimated_energy { background: var(--estimated_energy); }
.scroll { overflow-x: auto; margin: 1rem 0 0; border: 1px solid var(--line); border-radius: 10px; }
.scroll:focus-visible { outline: 2px solid var(--latency); outline-offset: 2px; }
table { width: 100%; border-collapse: collapse; font-size: .875rem; line-height: 1.45; font-variant-numeric: tabular-nums; }
th, td { padding: .6rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { color: var(--muted); font-weight: 500; font-size: .8125rem; background: var(--wash); vertical-align: bottom; }
tbody tr:last-child > * { border-bottom: 0; }
th:first-child, td:first-child, .text { text-align: left; }
tbody th { font-weight: 600; white-space: normal; min-width: 11.5rem; }
tbody th .dot { margin-right: .55rem; }
td small, th small { display: block; color: var(--muted); font-size: .75rem; font-weight: 400; }
.better { color: var(--good); font-weight: 600; } .worse { color: var(--bad); font-weight: 600; }
.figures { columns: 2 26rem; column-gap: 3rem; margin-top: 1.5rem; }
figure { margin: 0 0 2.75rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figcaption { margin-top: .6rem; color: var(--muted); font-size: .875rem; line-height: 1.5; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .4rem 1.5rem; margin: 1rem 0 0; font-size: .9375rem; }
dt { color: var(--muted); } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
pre { margin: 1rem 0; padding: 1rem 1.15rem; background: var(--wash); border: 1px solid var(--line); border-radius: 10px; overflow-x: auto; font: .875rem/1.6 var(--mono); white-space: pre; }
details { margin-top: 1rem; } summary { cursor: pointer; color: var(--latency); font-size: .9375rem; }
ul.plain { margin: .5rem 0 0; padding-left: 1.1rem; max-width: 44rem; } ul.plain li { margin-bottom: .4rem; }
footer { margin-top: 4rem; padding-top: 1.25rem; border-top: 1px solid var(--line); color: var(--muted); font-size: .8125rem; }
@media (max-width: 40rem) {
  main { padding: 2.25rem 1.1rem 3rem; }
  h2 { margin-top: 2.75rem; }
  dl { grid-template-columns: 1fr; gap: .1rem; } dd { margin-bottom: .7rem; }
  .cards { grid-template-columns: 1fr 1fr; } .cards li { padding: .85rem .95rem; } .cards .value { font-size: 1.25rem; }
  .cards li:last-child:nth-child(odd) { grid-column: 1 / -1; }
  th, td { padding: .55rem .7rem; }
}
@media print { main { max-width: none; padding: 0; } figure, .scroll { break-inside: avoid; } }
</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
"""
