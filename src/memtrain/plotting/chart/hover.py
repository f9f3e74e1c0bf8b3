"""The read-out under the pointer: the data that a chart carries, and the script that shows it."""

import json
from collections.abc import Sequence

from memtrain.plotting.chart.axes import Axis, Number
from memtrain.plotting.chart.lines import Points, Series

SCRIPT = """
(() => {
  const make = (parent, tag, kind, text) => {
    const node = parent.appendChild(document.createElement(tag));
    node.className = kind;
    node.textContent = text ?? "";
    return node;
  };
  const number = v => {
    const size = Math.abs(v);
    if (size && (size < 1e-4 || size >= 1e15)) return v.toExponential(3);
    const digits = Number.isInteger(v) ? 16 : Math.max(4, Math.floor(Math.log10(size)) + 2);
    return v.toLocaleString("en", { maximumSignificantDigits: Math.min(16, digits) });
  };
  const place = ([low, high, log], v) =>
    ((log ? Math.log10(v) : v) / 4 - low / 4) / (high / 4 - low / 4);
  const hides = [];
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const { axes, lines } = JSON.parse(figure.dataset.chart);
    const plot = figure.querySelector(".plot");
    const hover = make(plot, "div", "hover");
    hover.hidden = true;
    const hide = () => { hover.hidden = true; };
    const show = event => {
      const box = plot.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width;
      const near = lines.filter(line => line.points.length).map(line => {
        const [x, y] = line.points.reduce((best, point) =>
          Math.abs(place(axes[0], point[0]) - at) < Math.abs(place(axes[0], best[0]) - at)
            ? point : best);
        return { ...line, x, y, left: place(axes[0], x), top: 1 - place(axes[1], y) };
      });
      if (!near.length) return;
      hover.replaceChildren();
      hover.hidden = false;
      const closest = near.reduce((a, b) => Math.abs(b.left - at) < Math.abs(a.left - at) ? b : a);
      make(hover, "i", "rule").style.left = `${closest.left * 100}%`;
      const table = make(make(hover, "div", "readout"), "table", "");
      for (const { name, kind, x, y, left, top } of near) {
        if (top >= 0 && top <= 1) {
          const mark = make(hover, "i", `mark ${kind}`);
          mark.style.left = `${left * 100}%`;
          mark.style.top = `${top * 100}%`;
        }
        const row = make(table, "tr", kind);
        make(make(row, "td", ""), "span", "swatch").after(name);
        make(row, "td", "", number(y));
        make(row, "td", "at", `at ${number(x)}`);
      }
      /* Beside the rule, where there is more room; for a finger, above the plot. */
      const readout = table.parentNode, { offsetWidth: width, offsetHeight: height } = readout;
      const rule = closest.left * box.width, page = document.documentElement.clientWidth;
      const left = closest.left < 0.5 ? rule + 16 : rule - 16 - width;
      const most = page - 8 - width - box.left;
      readout.style.left = `${Math.max(8 - box.left, Math.min(left, most))}px`;
      const top = Math.min(event.clientY - box.top - height / 2, box.height - height - 6);
      readout.style.top = `${event.pointerType === "mouse" ? Math.max(6, top) : -height - 8}px`;
    };
    plot.addEventListener("pointermove", show);
    plot.addEventListener("pointerdown", show);
    plot.addEventListener("pointerleave", event => event.pointerType === "mouse" && hide());
    hides.push(event => plot.contains(event.target) || hide());
  }
  document.addEventListener("pointerdown", event => hides.forEach(hide => hide(event)));
})();
"""
"""Shows, under the pointer, the nearest point of each line. The page is legible without it."""


def hover_data(
    series: Sequence[Series], axes: Sequence[Axis], drawn: Sequence[Points], kinds: Sequence[str]
) -> str:
    """What the script knows of a chart, as JSON."""
    lines = [
        {"name": one.name, "kind": kind, "points": [[*map(_short, p)] for p in points if p]}
        for one, kind, points in zip(series, kinds, drawn, strict=True)
    ]
    ranges = [[axis.low, axis.high, axis.log] for axis in axes]
    return json.dumps({"axes": ranges, "lines": lines}, separators=(",", ":"))


def _short(value: Number) -> Number:
    """`value` in few characters; whole numbers stay exact."""
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.7g}")
