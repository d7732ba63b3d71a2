"use strict";
const plot = document.getElementById("plot");
const { data, layout } = JSON.parse(document.getElementById("figure").textContent);
const small = matchMedia("(pointer: coarse), (max-width: 600px)").matches;
if (small) {
  // A finger that drags means to scroll the page; names of phases have no room.
  layout.dragmode = false;
  layout.template.layout.margin.l = 44;
  for (const shape of layout.shapes ?? []) delete shape.label;
}
Plotly.newPlot(plot, data, layout, {
  displaylogo: false,
  responsive: true,
  doubleClick: "reset",
  displayModeBar: !small,
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]],
  toImageButtonOptions: { scale: 2 },
});
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
  Plotly.relayout(plot, { width: 660 });
});
addEventListener("afterprint", () => Plotly.relayout(plot, { width: null, autosize: true }));
