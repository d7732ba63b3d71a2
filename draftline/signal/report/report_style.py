"""How a report looks: light or dark as the reader's system is, on wide and narrow screens, on paper.

Colours that figures name ("--series-1") are defined here, once for each theme.
"""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f4f6f8; --surface: #ffffff; --ink: #1a1f25; --muted: #56616c; --line: #d8dee5;
  --grid: #e7ebef; --accent: #1f5fbf;
  --series-1: #1f5fbf; --series-2: #c2570c; --series-3: #0b7a5b; --series-4: #7a3db8;
  --series-5: #b3306b; --event: #1a1f25;
  --series-1-wash: rgba(31, 95, 191, 0.28); --series-2-wash: rgba(194, 87, 12, 0.42);
  --band-load: rgba(110, 122, 135, 0.16); --band-warm: rgba(222, 160, 20, 0.17);
  --band-run: rgba(31, 150, 90, 0.06); --band-evaluate: rgba(70, 105, 225, 0.15);
  --band-checkpoint: rgba(150, 80, 200, 0.17); --band-other: rgba(110, 122, 135, 0.07);
  --band-edge: rgba(110, 122, 135, 0.28);
  --ok: #0a6b38; --ok-wash: #e5f4ea; --bad: #a81f17; --bad-wash: #fbe9e7;
  --warn: #7d5200; --warn-wash: #fdf2d8; --dim: #56616c; --dim-wash: #eaeef2;
}
@media (prefers-color-scheme: dark) {
  :root:not(.print) {
    --page: #0f1317; --surface: #171c22; --ink: #e5e9ee; --muted: #9ba7b4; --line: #2d353f;
    --grid: #262d35; --accent: #74adff;
    --series-1: #74adff; --series-2: #f49a4c; --series-3: #45c79c; --series-4: #c29eff;
    --series-5: #f285b5; --event: #e5e9ee;
    --series-1-wash: rgba(116, 173, 255, 0.28); --series-2-wash: rgba(244, 154, 76, 0.42);
    --band-load: rgba(150, 165, 180, 0.16); --band-warm: rgba(235, 180, 60, 0.16);
    --band-run: rgba(60, 200, 130, 0.06); --band-evaluate: rgba(110, 145, 255, 0.18);
    --band-checkpoint: rgba(190, 130, 240, 0.18); --band-other: rgba(150, 165, 180, 0.08);
    --band-edge: rgba(150, 165, 180, 0.3);
    --ok: #5fd394; --ok-wash: #14291e; --bad: #ff9389; --bad-wash: #331a18;
    --warn: #f0c060; --warn-wash: #2f2612; --dim: #9ba7b4; --dim-wash: #20262d;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header, main, footer { max-width: 1160px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
.kicker { margin: 0; color: var(--muted); font-size: 13px; }
h1 { margin: 2px 0; font-size: 28px; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 40px 0 12px; font-size: 20px; }
h3 { margin: 0; font-size: 16px; overflow-wrap: anywhere; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.meta, .caption { color: var(--muted); }
.caption { font-size: 13px; max-width: 80ch; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 10px 0 18px; font-size: 14px; }
a { color: var(--accent); }
.verdict { border: 1px solid var(--line); border-left: 6px solid var(--tone); border-radius: 8px;
  background: var(--wash); padding: 14px 18px; }
.ok { --tone: var(--ok); --wash: var(--ok-wash); }
.bad { --tone: var(--bad); --wash: var(--bad-wash); }
.warn { --tone: var(--warn); --wash: var(--warn-wash); }
.dim { --tone: var(--dim); --wash: var(--dim-wash); }
.verdict h2 { display: flex; gap: 10px; align-items: baseline; margin: 0 0 4px; font-size: 22px;
  color: var(--tone); }
.device { border-top: 1px solid var(--line); margin-top: 12px; padding-top: 10px; }
.device dl { display: grid; grid-template-columns: 7.5em 1fr; gap: 3px 12px; margin: 6px 0 0; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px;
  margin: 16px 0 0; }
.tile { background: var(--surface); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px; }
.tile b { display: block; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; }
figure, .card { background: var(--surface); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 16px; margin: 0 0 14px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
.pair figure { min-width: 0; margin: 0; }
.pair figure:first-child:nth-last-child(odd) { grid-column: 1 / -1; }
figcaption { margin-top: 8px; }
.row { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 6px 12px;
  align-items: baseline; }
button { font: inherit; font-size: 13px; color: var(--ink); background: var(--page);
  border: 1px solid var(--line); border-radius: 6px; padding: 3px 10px; cursor: pointer; }
button:focus-visible, a:focus-visible, summary:focus-visible { outline: 2px solid var(--accent);
  outline-offset: 2px; }
.keys { display: flex; flex-wrap: wrap; gap: 2px 4px; margin: 6px 0 2px -8px; }
button.key { background: none; border: 0; padding: 2px 8px; }
button.key[aria-pressed="false"] { color: var(--muted); text-decoration: line-through; }
.key i { display: inline-block; width: 24px; border-top: 2px solid; margin-right: 7px;
  vertical-align: 4px; }
.key i[style*="height"] { vertical-align: -1px; }
.key i.mark { width: auto; border: 0; font-style: normal; vertical-align: 0; }
.plot { width: 100%; min-height: 250px; }
.phases { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 6px 0 2px; padding: 0;
  list-style: none; font-size: 13px; color: var(--muted); }
.phases i { display: inline-block; width: 14px; height: 12px; margin-right: 6px;
  border: 1px solid var(--band-edge); vertical-align: -1px; }
.scroll { overflow-x: auto; }
.caption + figure, .caption + .pair { margin-top: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0;
  border-bottom: 1px solid var(--grid); overflow-wrap: break-word; }
td.long { min-width: 15em; }
td.broken { overflow-wrap: anywhere; }
th { color: var(--muted); font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; }
summary { cursor: pointer; font-weight: 600; }
details > .scroll { margin-top: 10px; }
footer { color: var(--muted); font-size: 13px; padding-top: 24px; padding-bottom: 40px; }
@media (max-width: 760px) {
  header, main, footer { padding-left: 12px; padding-right: 12px; }
  .pair { grid-template-columns: 1fr; }
  figure, .card { padding: 12px 10px; }
  .verdict { padding: 12px; }
  .device dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 6px; }
  h1 { font-size: 23px; }
  .rows thead { display: none; }
  .rows tr { display: block; padding: 7px 0; border-bottom: 1px solid var(--line); }
  .rows tr:last-child { border-bottom: 0; }
  .rows td { display: grid; grid-template-columns: 6.5em 1fr; border: 0; padding: 1px 0;
    overflow-wrap: anywhere; min-width: 0; }
  .rows td.number { text-align: left; }
  .rows td:empty { display: none; }
  .rows td::before { content: attr(data-label); color: var(--muted); }
}
@media print {
  body { background: #fff; font-size: 11pt; }
  nav, button:not(.key), .modebar { display: none !important; }
  figure, .card, .verdict, .device, tr { break-inside: avoid; }
  .verdict, .phases i, .key i { print-color-adjust: exact; }
  h2 { break-after: avoid; }
  .pair { grid-template-columns: 1fr; }
}
"""
