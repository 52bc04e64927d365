"""The gauges as a small SVG: one panel a figure, one line a process, broken where it was restarted."""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.faults.gauges import Reading

WIDTH, PANEL, LEFT, RIGHT, GAP = 900, 200, 55, 130, 46
TITLES = {"rss_mb": "memory of each process, MB", "files": "open files", "redis_mb": "memory of Redis, MB"}
COLOURS = ("#1b6ca8", "#c0392b", "#27864f", "#8e44ad", "#b9770e", "#117a65", "#7f8c8d", "#d35400", "#2c3e50")


def draw(readings: Sequence[Reading], title: str, to: Path) -> None:
    """Write the picture."""
    height = GAP + len(TITLES) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    ]
    parts += [f'<rect width="{WIDTH}" height="{height}" fill="white"/>']
    parts += [f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>']
    for number, what in enumerate(TITLES):
        chosen = [reading for reading in readings if reading.what == what]
        if chosen:
            parts += _panel(chosen, TITLES[what], GAP + number * (PANEL + GAP))
    to.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def _panel(readings: Sequence[Reading], title: str, top: int) -> list[str]:
    end_s = max(reading.at_s for reading in readings) or 1.0
    most = 1.1 * max(reading.value for reading in readings) or 1.0
    bottom, wide = top + PANEL, WIDTH - LEFT - RIGHT
    parts = [f'<text x="{LEFT}" y="{top - 6}" font-size="12">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * PANEL
        parts.append(f'<path d="M{LEFT} {y:.0f}h{wide}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.0f}" font-size="10" text-anchor="end">{share * most:.0f}</text>'
        )
        x, minutes = LEFT + share * wide, share * end_s / 60
        below = f'<text x="{x:.0f}" y="{bottom + 14}" font-size="10" text-anchor="middle">'
        parts.append(f"{below}{minutes:.0f} min</text>")
    lives: dict[tuple[str, int], list[Reading]] = {}
    for reading in readings:
        lives.setdefault((reading.process, reading.pid), []).append(reading)
    names = sorted({process for process, _ in lives})
    for (process, _), life in lives.items():
        points = " ".join(
            f"{LEFT + r.at_s / end_s * wide:.1f},{bottom - r.value / most * PANEL:.1f}" for r in life
        )
        colour = COLOURS[names.index(process) % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
    for row, name in enumerate(names):
        colour, y = COLOURS[row % len(COLOURS)], top + 10 + 14 * row
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{y}" font-size="11" fill="{colour}">{escape(name)}</text>'
        )
    return parts
