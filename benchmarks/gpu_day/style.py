"""The style sheet of the page of benchmarks.gpu_day, and the colours of statuses."""

# (Colour, mark) of each status: Okabe and Ito's colours, which people with colour blindness can tell apart, and violet.
STATUSES = {
    "passed": ("#009e73", "✓"),
    "wrong": ("#d55e00", "✗"),
    "slow": ("#e69f00", "↓"),
    "error": ("#cc79a7", "!"),
    "hang": ("#a78bfa", "∞"),
    "not run": ("#8c8c8c", "–"),
}
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --line: #d8dee4; --paper: #fff; --panel: #f6f8fa;
  --idle: #eeeeee; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --soft: #9aa5b1; --line: #3a424c; --paper: #14181d; --panel: #1d232a; --idle: #323a44; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: clamp(10px, 2.5vw, 24px); background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 8px; }
h3 { font-size: 14px; margin: 20px 0 6px; } p { margin: 4px 0; }
.soft, figcaption { color: var(--soft); font-size: 13px; }
.note { border-left: 4px solid #e69f00; padding: 4px 10px; background: var(--panel); }
.claims { list-style: none; margin: 0; padding: 0; } .claims li { display: flex; gap: 10px; margin: 5px 0; }
.mark, .status i { flex: none; display: inline-block; width: 18px; height: 18px; border-radius: 4px; color: #111;
  font: bold 13px/18px system-ui, sans-serif; text-align: center; }
.claims .mark { margin-top: 2px; background: #8c8c8c; } .holds .mark { background: #009e73; }
.fails .mark { background: #d55e00; }
.status { white-space: nowrap; } .status i { margin-right: 6px; } h3 .status { font-weight: 400; margin-left: 8px; }
.facts { display: flex; flex-wrap: wrap; gap: 10px; margin: 10px 0 16px; }
.facts div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 6px 12px; }
.facts dt { font-size: 13px; } .facts dd { margin: 0; font-size: 19px; font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 8px; text-align: right; vertical-align: top; white-space: nowrap; font-size: 13px; }
thead th { border-bottom: 2px solid var(--line); font-size: 11px; color: var(--soft); vertical-align: bottom;
  white-space: normal; overflow-wrap: normal; }
tbody tr { border-bottom: 1px solid var(--line); } td.text, th.text { text-align: left; }
td.wrap { white-space: normal; width: 100%; } table.full { width: 100%; }
th[scope="rowgroup"] { padding-top: 14px; }
.wrapped { white-space: normal; min-width: 200px; max-width: 520px; }
.rounds { display: inline-block; min-width: 150px; white-space: normal; }
.rows { display: grid; grid-template-columns: fit-content(34%) 1fr max-content; gap: 2px 12px; align-items: center;
  font-size: 13px; font-variant-numeric: tabular-nums; }
.rows .head { grid-column: 1 / -1; margin-top: 8px; } .rows .value { text-align: right; white-space: nowrap; }
.rows svg { display: block; width: 100%; height: 16px; overflow: visible; } .rows svg.bar { height: 13px; }
.rows svg.bar { background: var(--idle); overflow: hidden; } .rows svg.pair { height: 20px; }
.limit { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 2; } text { fill: var(--soft); font-size: 11px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 16px;
  align-items: end; }
figure { margin: 0; } svg.losses { width: 100%; max-width: 560px; display: block; }
.axes { fill: none; stroke: var(--soft); stroke-width: 1; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0; padding: 0; list-style: none; font-size: 13px; }
.key i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border-radius: 2px; }
details { margin: 4px 0; font-size: 13px; } summary { cursor: pointer; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px;
  margin: 4px 0 10px; white-space: pre-wrap; font-size: 12.5px; line-height: 1.45; } .command { user-select: all; }
@media (max-width: 600px) { .rows { grid-template-columns: 1fr max-content; } .rows .name { grid-column: 1 / -1; } }
@media print { body { max-width: none; padding: 0; font-size: 11px; print-color-adjust: exact; }
  figure, tr { break-inside: avoid; } .scroll { overflow: visible; } th, td { padding: 2px 3px; font-size: 9px; } }
"""
