"use strict";
// Draws every chart in the colours of the page, and again when the reader's preference changes.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function themed(layout) {
  const ink = colour("--ink"), line = colour("--line");
  const own = {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 12 },
    margin: { l: 48, r: 12, t: 10, b: 44 },
    legend: { orientation: "h", y: -0.22, x: 0, font: { size: 11 } },
    hoverlabel: { bgcolor: colour("--ground"), bordercolor: line, font: { color: ink } },
    dragmode: false,
    autosize: true,
  };
  for (const axis of ["xaxis", "yaxis"]) {
    own[axis] = { ...layout[axis], gridcolor: line, linecolor: line, zerolinecolor: line };
  }
  return own;
}

function draw(node) {
  const figure = JSON.parse(document.getElementById(node.dataset.figure).textContent);
  const options = { responsive: true, displayModeBar: false };
  return Plotly.react(node, figure.data, themed(figure.layout), options).then(() => {
    node.dataset.drawn = "yes";
  });
}

const isShown = (node) => node.closest("details:not([open])") === null;
const drawShown = () => {
  for (const node of document.querySelectorAll(".chart:not([data-drawn])")) {
    if (isShown(node)) draw(node);
  }
};
for (const run of document.querySelectorAll("details.run")) run.addEventListener("toggle", drawShown);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const node of document.querySelectorAll(".chart[data-drawn]")) draw(node);
});
drawShown();
