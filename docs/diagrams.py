"""Draw the pictures of development/architecture.md: ``python docs/diagrams.py`` writes them into docs/images."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
INK, GREY = "#1f2937", "#4b5563"
BLUE, GREEN, ORANGE, PLAIN = "#e0e7ff", "#dcfce7", "#ffedd5", "#f3f4f6"


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines of text; coordinates are those of its upper left corner."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    fill: str = PLAIN

    def draw(self) -> str:
        """SVG of the rectangle and its text, centred."""
        middle = self.x + self.width // 2
        first = self.y + self.height // 2 - 9 * len(self.lines) + 5
        text = [f'<text x="{middle}" y="{first}" class="title">{escape(self.title)}</text>']
        text += [
            f'<text x="{middle}" y="{first + 18 * (i + 1)}" class="line">{escape(line)}</text>'
            for i, line in enumerate(self.lines)
        ]
        size = f'width="{self.width}" height="{self.height}" rx="6"'
        shape = f'<rect x="{self.x}" y="{self.y}" {size} fill="{self.fill}"/>'
        return "\n".join([shape, *text])


def arrow(*points: tuple[int, int], label: str = "", at: tuple[int, int] = (0, 0)) -> str:
    """SVG of a line through ``points`` with an arrow head, and its label."""
    path = " ".join(f"{x},{y}" for x, y in points)
    line = f'<polyline points="{path}" class="arrow" marker-end="url(#head)"/>'
    return line + (f'\n<text x="{at[0]}" y="{at[1]}" class="label">{escape(label)}</text>' if label else "")


def svg(width: int, height: int, description: str, parts: list[str]) -> str:
    """A whole picture on a white background, so that it can be read in dark mode too."""
    body = "\n".join(parts)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">
<title>{escape(description)}</title>
<style>
text {{ font-family: system-ui, sans-serif; text-anchor: middle; fill: {INK}; }}
.title {{ font-size: 15px; font-weight: 600; }}
.line {{ font-size: 13px; fill: {GREY}; }}
.label {{ font-size: 12px; font-style: italic; fill: {GREY}; }}
rect {{ stroke: {GREY}; stroke-width: 1; }}
.arrow {{ fill: none; stroke: {GREY}; stroke-width: 1.5; }}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>
<rect width="{width}" height="{height}" fill="white" stroke="none" style="stroke:none"/>
{body}
</svg>
"""


def layers() -> str:
    """The layers, highest first."""
    rows: list[list[tuple[str, str, str]]] = [
        [("dsa_hw/cli", "commands: parse, call, print", BLUE)],
        [("dsa_hw/experiments", "compare, sweep, report pages", BLUE)],
        [("dsa_hw/pipeline", "budget in, certified network out", BLUE)],
        [("dsa_hw/methods", "keep ratios under limits: dsa/ and baselines/", BLUE)],
        [("dsa_hw/training", "fine-tuning, batch-norm statistics, metrics", BLUE)],
        [("budgets", "cost as a function F(alpha)", GREEN), ("profilers", "measurements on a device", ORANGE)],
        [("dsa_hw/zoo", "networks and data by name", BLUE), ("dsa_hw/channels", "channel groups and surgery", BLUE)],
        [("dsa_hw/profiles, utils, units, errors", "shared types and helpers", PLAIN)],
    ]
    parts = []
    for i, row in enumerate(rows):
        width = (600 - 20 * (len(row) - 1)) // len(row)
        for j, (title, line, fill) in enumerate(row):
            parts.append(Box(20 + j * (width + 20), 20 + 66 * i, width, 52, title, (line,), fill).draw())
    parts.append(arrow((655, 24), (655, 20 + 66 * 8 - 18)))
    parts.append(f'<text transform="translate(676 {20 + 33 * 8}) rotate(90)" class="label">imports</text>')
    return svg(700, 20 + 66 * 8, "Layers of the packages; each layer imports only the layers below it", parts)


def data_flow() -> str:
    """From a network and a budget to a certified network."""
    boxes = [
        Box(20, 20, 190, 64, "network", ("nn.Module, example inputs",)),
        Box(300, 20, 200, 64, "channel groups", ("dsa_hw.channels",), BLUE),
        Box(590, 20, 190, 64, "target", ("runtime and device",)),
        Box(590, 150, 190, 64, "profile", ("profilers",), ORANGE),
        Box(300, 150, 200, 64, "cost model F(alpha)", ("budgets",), GREEN),
        Box(20, 150, 190, 64, "budgets", ("latency, energy, FLOPs ...",)),
        Box(300, 280, 200, 64, "method", ("dsa_hw.methods",), BLUE),
        Box(20, 280, 190, 64, "guidance", ("train and val data, or none",)),
        Box(300, 410, 200, 64, "width search", ("dsa_hw.pipeline",), BLUE),
        Box(20, 410, 190, 64, "smaller network", ("surgery: dsa_hw.channels",), BLUE),
        Box(590, 410, 190, 64, "measurement", ("profilers",), ORANGE),
        Box(300, 540, 200, 64, "certificate", ("dsa_hw.pipeline",), BLUE),
    ]
    arrows = [
        arrow((210, 52), (300, 52), label="trace", at=(252, 44)),
        arrow((500, 66), (545, 66), (545, 168), (590, 168), label="configurations", at=(590, 122)),
        arrow((685, 84), (685, 150)),
        arrow((590, 196), (500, 196), label="table", at=(545, 190)),
        arrow((400, 84), (400, 150), label="counted costs", at=(445, 122)),
        arrow((210, 182), (300, 182), label="limits", at=(252, 174)),
        arrow((400, 214), (400, 280), label="F and gradient", at=(450, 252)),
        arrow((210, 312), (300, 312)),
        arrow((400, 344), (400, 410), label="keep ratios", at=(440, 382)),
        arrow((300, 442), (210, 442), label="widths", at=(256, 434)),
        arrow((115, 474), (115, 508), (640, 508), (640, 474), label="on the target", at=(556, 502)),
        arrow((590, 426), (500, 426), label="correct", at=(545, 402)),
        '<text x="545" y="418" class="label">the limit</text>',
        arrow((730, 474), (730, 572), (500, 572), label="interval and verdict", at=(615, 564)),
    ]
    return svg(800, 624, "Data flow of dsa_hw.allocate", [box.draw() for box in boxes] + arrows)


def main() -> None:
    """Write both pictures."""
    (IMAGES / "layers.svg").write_text(layers())
    (IMAGES / "data-flow.svg").write_text(data_flow())


if __name__ == "__main__":
    main()
