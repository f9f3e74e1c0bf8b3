"""The style sheet of a page and its charts: screen, phone and paper, light and dark."""

# The palette is Okabe and Ito's, told apart by colour-blind readers too; grey is for references.
STYLE = """
:root {
  --paper: #fff; --ink: #1b1e21; --soft: #5c636a; --line: #d9dcdf; --grid: #eceef0;
  --tint: #eef5fa; --grey: #878d93;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #15181b; --ink: #e4e6e8; --soft: #a0a7ae; --line: #3a4046; --grid: #262b30;
    --tint: #1a2730; --grey: #868e96;
    --c0: #56b4e9; --c1: #e8722a; --c2: #1fb587; --c3: #d58fb5; --c4: #e69f00; --c5: #f0e442;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0 auto; max-width: 1048px; padding: 72px 24px 48px; background: var(--paper);
  color: var(--ink); font: 17px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue",
    "Noto Sans", "Liberation Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums lining-nums; overflow-wrap: break-word;
}
h1 { margin: 0 0 20px; font-size: 38px; line-height: 1.15; letter-spacing: -0.02em;
  font-weight: 650; text-wrap: balance; }
h2 { margin: 72px 0 12px; font-size: 23px; line-height: 1.3; letter-spacing: -0.01em;
  font-weight: 650; break-after: avoid; }
p { margin: 0 0 16px; max-width: 720px; text-wrap: pretty; }
.lead { max-width: 860px; margin-bottom: 40px; font-size: 20px; line-height: 1.55;
  white-space: pre-line; }
.notice { max-width: 860px; padding: 14px 18px; background: var(--tint);
  border-left: 3px solid var(--c1); print-color-adjust: exact; }
.note { margin: 10px 0 0; font-size: 14px; line-height: 1.5; color: var(--soft); }
.note:empty { display: none; }
footer { margin-top: 80px; padding-top: 16px; border-top: 1px solid var(--line);
  font-size: 14px; color: var(--soft); white-space: pre-line; }

.table { margin: 32px 0 56px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 16px; line-height: 1.4; }
th, td { padding: 10px 0 10px 28px; text-align: left; vertical-align: baseline;
  border-bottom: 1px solid var(--line); }
th:first-child { padding-left: 12px; }
tr > :last-child { padding-right: 12px; }
thead th { font-size: 14px; font-weight: 400; color: var(--soft); vertical-align: bottom; }
thead th { border-bottom-color: var(--ink); }
tbody th { font-weight: 400; }
.number { text-align: right; white-space: nowrap; }
thead .number { white-space: normal; }
.highlight > * { background: var(--tint); font-weight: 650; }
.highlight > th { box-shadow: inset 3px 0 var(--c0); }
.highlight > * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }

details { margin: 0 0 12px; padding-left: 14px; border-left: 2px solid var(--line); }
details > details { margin-left: 4px; }
summary { cursor: pointer; color: var(--soft); }
details[open] > summary { margin-bottom: 16px; color: var(--ink); }
details .table { margin: 8px 0 28px; }
pre { overflow-x: auto; padding: 12px; background: var(--tint); font-size: 13px;
  line-height: 1.45; }

figure { margin: 0 0 64px; break-inside: avoid; }
p + figure, p + .columns { margin-top: 36px; }
.picture img { display: block; max-width: 100%; height: auto; }
.chart { display: grid; grid-template-columns: minmax(0, 1fr); font-size: 13px; line-height: 16px; }
.chart figcaption { font-size: 18px; line-height: 1.35; font-weight: 650; text-wrap: balance; }
.chart .note { margin-top: 14px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 8px 0 2px; font-size: 14px; }
.key { display: inline-flex; align-items: baseline; gap: 7px; line-height: 20px; }
.key.strong { font-weight: 650; }
.key svg { flex: none; width: 22px; height: 10px; }
.frame { display: grid; grid-template-columns: auto minmax(0, 1fr) auto;
  grid-template-rows: auto 300px 24px auto; padding: 12px 18px 0 0; }
.compact .frame { grid-template-rows: auto 230px 24px auto; }
.frame > div { color: var(--soft); }
.y-label { grid-area: 1 / 1 / 2 / 4; padding-bottom: 14px; }
.y-ticks { grid-area: 2 / 1; display: grid; text-align: right; padding-right: 10px; }
.y-ticks span { grid-area: 1 / 1; position: relative; height: 16px; margin-top: -8px; }
.plot { grid-area: 2 / 2; position: relative; touch-action: pan-y; cursor: crosshair; }
.plot > svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible;
  clip-path: inset(-5px); }
.empty { position: absolute; inset: 45% 0 auto; margin: 0; max-width: none; text-align: center; }
.ends { grid-area: 2 / 3; display: none; font-size: 14px; }
.ends > span { grid-area: 1 / 1; position: relative; height: 20px; margin-top: -10px;
  padding-left: 18px; white-space: nowrap; }
.frame > .ends, .legend { color: var(--ink); }
.x-ticks { grid-area: 3 / 2; position: relative; }
.x-ticks span { position: absolute; top: 8px; transform: translateX(-50%); white-space: nowrap; }
.x-label { grid-area: 4 / 2; padding-top: 6px; text-align: right; }
@media (min-width: 760px), print {
  .ended .legend { display: none; }
  .ended .ends { display: grid; }
  .ended .frame { padding-right: 0; }
}

path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.grid { stroke: var(--grid); }
.base { stroke: var(--grey); }
.upright { stroke: var(--soft); stroke-dasharray: 2 3; }
.upright-label { position: absolute; bottom: 4px; padding: 0 6px; color: var(--soft);
  white-space: nowrap; pointer-events: none; }
.upright-label.before { transform: translateX(-100%); }
.c0 { --own: var(--c0); } .c1 { --own: var(--c1); } .c2 { --own: var(--c2); }
.c3 { --own: var(--c3); } .c4 { --own: var(--c4); } .c5 { --own: var(--c5); }
.grey { --own: var(--grey); }
.line { stroke: var(--own); stroke-width: 1.75px; stroke-linecap: round; }
.line.grey { stroke-width: 1.25px; }
.line.strong { stroke-width: 2.75px; }
.line.dashed { stroke-dasharray: 5 4; stroke-linecap: butt; }
.line.dotted { stroke-dasharray: 0.1 4; }
.dot { stroke: var(--own); stroke-width: 6px; stroke-linecap: round; }
.dot.strong { stroke-width: 8px; }

.hover { position: absolute; inset: 0; pointer-events: none; }
.hover[hidden] { display: none; }
.rule { position: absolute; top: 0; bottom: 0; border-left: 1px solid var(--grey); }
.mark { position: absolute; width: 9px; height: 9px; margin: -4.5px; border-radius: 50%;
  background: var(--own); border: 1.5px solid var(--paper); }
.readout { position: absolute; z-index: 1; padding: 4px 10px; background: var(--paper);
  border: 1px solid var(--line); border-radius: 3px; color: var(--ink); width: max-content;
  max-width: calc(100vw - 16px); }
.readout table { width: auto; font-size: 13px; }
.readout td { padding: 3px 0 3px 14px; border: 0; text-align: right; }
.readout .at { color: var(--soft); font-weight: 400; padding-left: 10px; text-align: left; }
.readout :first-child { padding-left: 0; text-align: left; }
.readout tr > :last-child { padding-right: 0; }
.readout .strong { font-weight: 650; }
.swatch { display: inline-block; width: 12px; margin-right: 7px; vertical-align: middle;
  border-top: 3px solid var(--own); }

.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
  column-gap: 56px; }
.columns > figure { grid-row: span 4; }
.columns + h2 { margin-top: 8px; }
.columns > .chart { grid-template-rows: subgrid; row-gap: 0; }

@media screen and (max-width: 640px) {
  body { padding: 36px 18px 32px; font-size: 16px; }
  h1 { font-size: 29px; }
  h2 { margin-top: 52px; font-size: 21px; }
  .lead { font-size: 18px; }
  .frame { grid-template-rows: auto 240px 24px auto; }
  .table thead { display: none; }
  .table tr { display: grid; grid-template-columns: repeat(3, 1fr); gap: 8px 12px; align-items: end;
    padding: 14px 12px; border-bottom: 1px solid var(--line); }
  .table tr > * { display: block; padding: 0; border: 0; text-align: left; }
  .table th { grid-column: 1 / -1; }
  .table tr:first-child { border-top: 1px solid var(--ink); }
  .table td::before { content: attr(data-label); display: block; font-size: 13px;
    font-weight: 400; color: var(--soft); white-space: normal; }
  .table td:empty::after { content: "\\00a0"; }
  .table .highlight { background: var(--tint); box-shadow: inset 3px 0 var(--c0); }
  .table .highlight > * { background: none; box-shadow: none; }
}
@media print {
  body { padding: 0; font-size: 11pt; max-width: none; }
  h1 { font-size: 22pt; }
  .lead { font-size: 12.5pt; }
  figure { margin-bottom: 36px; }
  .plain .frame { grid-template-rows: auto 220px 24px auto; }
  .columns { grid-template-columns: 1fr 1fr; column-gap: 32px; }
  .table { overflow: visible; }
  tr { break-inside: avoid; }
  footer { margin-top: 40px; }
}
"""
