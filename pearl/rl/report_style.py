"""How the report page looks: one style sheet, light and dark as the reader's system is."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1d232b; --faint: #66707c; --paper: #ffffff; --box: #f5f6f8; --grid: #dfe3e8;
  --c0: #2f6fb3; --c1: #d0742c; --c2: #3d9a63; --c3: #8c64b4; --c4: #b9475f; --c5: #8a8f98; --c6: #2aa3a3; --c7: #a9a25a;
  --unlikely: #e0733a; --likely: #cfe6d4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --faint: #98a2ae; --paper: #14181d; --box: #1e242b;
  --grid: #323a44; --c0: #6ea8e6; --c1: #eda15f; --c2: #6fc792; --c3: #b893dd; --c4: #e57f95; --c5: #9aa1ab; --c6: #5fd0d0;
  --c7: #cfc67b; --unlikely: #b4501f; --likely: #234a33; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 980px; margin: 24px auto;
  padding: 0 16px; }
h1 { font-size: 24px; margin: 0 0 12px; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 28px 0 8px; }
.facts { display: flex; flex-wrap: wrap; gap: 8px; }
.facts div { background: var(--box); border-radius: 6px; padding: 8px 12px; }
.facts b { display: block; font-size: 17px; } .facts span, small, figcaption { color: var(--faint); font-size: 13px; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); gap: 12px; }
figure { margin: 0; background: var(--box); border-radius: 6px; padding: 8px 10px; } figure.wide { margin-top: 12px; }
figcaption { color: var(--ink); margin-bottom: 4px; }
figcaption i { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin: 0 4px 0 10px; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: var(--faint); }
.grid { stroke: var(--grid); } .lane { fill: var(--grid); opacity: 0.45; }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; } .line circle { fill: var(--c); }
details { background: var(--box); border-radius: 6px; padding: 8px 12px; margin: 8px 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; margin: 8px 0 2px; }
.given { color: var(--faint); }
.sampled { background: color-mix(in srgb, var(--unlikely) var(--p, 0%), var(--likely)); border-radius: 3px; }
.legend span { padding: 1px 5px; } .error { color: var(--c4); }
table { border-collapse: collapse; font-size: 14px; }
td, th { padding: 2px 18px 2px 0; text-align: left; overflow-wrap: anywhere; }
td:first-child { font-family: ui-monospace, monospace; white-space: nowrap; vertical-align: top; }
"""
