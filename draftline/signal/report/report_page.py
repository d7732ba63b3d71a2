"""The frame of a report: one HTML page with its style, its script and plotly inside.

The page asks nothing of the network, and its policy lets nothing run but the scripts that are named
by their digest: a text of the run that slipped through the escaping would still be only a text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from typing import Any

from draftline.signal.report.report_style import STYLE

# How a file says that it is a report, which another report may replace.
GENERATOR = '<meta name="generator" content="draftline report">'

SCRIPT = """
(() => {
  "use strict";
  const root = document.documentElement;
  const small = matchMedia("(pointer: coarse), (max-width: 600px)").matches;
  const asIs = new Set(["x", "y", "text", "customdata"]);
  const resolve = (value, css, key) => {
    if (typeof value === "string") {
      const named = /color$/i.test(key) && value.startsWith("--");
      return named ? css.getPropertyValue(value).trim() : value;
    }
    if (Array.isArray(value)) {
      return asIs.has(key) ? value : value.map((item) => resolve(item, css, key));
    }
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([name, inner]) => [name, resolve(inner, css, name)])
    );
  };
  const charts = [...document.querySelectorAll("[data-figure]")].map((node) => {
    const figure = JSON.parse(document.getElementById(node.dataset.figure).textContent);
    return { node, figure, width: null, height: figure.layout.yaxis.range, hidden: new Set() };
  });
  const config = {
    displaylogo: false,
    responsive: true,
    doubleClick: false,
    displayModeBar: small ? false : "hover",
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"]],
    toImageButtonOptions: { scale: 2 },
  };
  const draw = () => {
    const css = getComputedStyle(root);
    for (const chart of charts) {
      const layout = resolve(chart.figure.layout, css, "");
      if (small) {
        // A finger that drags means to scroll the page; names of phases have no room.
        Object.assign(layout, { dragmode: false, annotations: [] });
        Object.assign(layout.margin, { l: 44, t: 10 });
        layout.font.size = 11;
      }
      // Drawn again, in other colours or for paper, it shows what it showed.
      for (const axis of ["xaxis", "yaxis"]) {
        if (chart.node.layout && !chart.node.layout[axis].autorange) {
          layout[axis].range = [...chart.node.layout[axis].range];
        }
      }
      if (chart.width) layout.width = chart.width;
      const data = resolve(chart.figure.data, css, "");
      for (const number of chart.hidden) data[number].visible = false;
      Plotly.react(chart.node, data, layout, config);
    }
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  const chartOf = (button) =>
    charts.find(({ node }) => node.id === button.getAttribute("aria-controls"));
  const vertical = (range) => (range ? { "yaxis.range": [...range] } : { "yaxis.autorange": true });
  const whole = () => {
    for (const { node, figure, height } of charts) {
      Plotly.relayout(node, { "xaxis.range": [...figure.layout.xaxis.range], ...vertical(height) });
    }
  };
  document.getElementById("whole")?.addEventListener("click", whole);
  let following = false;
  for (const { node } of charts) {
    node.on("plotly_doubleclick", whole);
    node.on("plotly_relayout", async (change) => {
      const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (following || range[0] === undefined) return;
      following = true;
      try {
        for (const other of charts) {
          if (other.node !== node) await Plotly.relayout(other.node, { "xaxis.range": [...range] });
        }
      } finally {
        following = false;
      }
    });
  }
  for (const button of document.querySelectorAll("[data-curve]")) {
    const { node, hidden } = chartOf(button);
    const number = Number(button.dataset.curve);
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      hidden[shown ? "delete" : "add"](number);
      Plotly.restyle(node, { visible: shown }, [number]);
    });
  }
  for (const button of document.querySelectorAll("[data-ranges]")) {
    const ranges = JSON.parse(button.dataset.ranges);
    button.addEventListener("click", () => {
      const close = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(close));
      button.textContent = close ? "Show from zero" : "Close up of the steady state";
      const chart = chartOf(button);
      chart.height = close ? ranges.close : ranges.whole;
      Plotly.relayout(chart.node, vertical(chart.height));
    });
  }

  const closed = [];
  addEventListener("beforeprint", () => {
    root.classList.add("print");
    for (const part of document.querySelectorAll("details:not([open])")) {
      part.open = true;
      closed.push(part);
    }
    for (const chart of charts) chart.width = 660;
    draw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("print");
    for (const part of closed.splice(0)) part.open = false;
    for (const chart of charts) chart.width = null;
    draw();
  });
})();
"""


def page(title: str, body: str, figures: dict[str, dict[str, Any]], plotly_js: str) -> str:
    """The whole document. `body` is HTML, `figures` what its plots (by id) show."""
    scripts = [plotly_js, SCRIPT] if figures else []
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        GENERATOR,
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{STYLE}</style>",
        "</head>",
        "<body>",
        body,
        "<noscript><p>The charts need JavaScript; verdict and tables do not.</p></noscript>"
        if figures
        else "",
        *(
            f'<script type="application/json" id="{name}">{_data(figure)}</script>'
            for name, figure in figures.items()
        ),
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _data(figure: dict[str, Any]) -> str:
    """JSON that no HTML parser can take for markup."""
    text = json.dumps(figure, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
