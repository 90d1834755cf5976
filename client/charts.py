"""Draw curves of losses as text, for terminals. plotext draws; it is loaded with the first chart."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

COLORS = ("blue+", "orange+", "green+", "magenta+", "cyan+", "red+")
_LEAST_POINTS = 2
_MOST_TICKS = 5


class Line(NamedTuple):
    """One curve: its name, and a loss for each step; None where the loss was not finite."""

    name: str
    steps: Sequence[int]
    losses: Sequence[float | None]


def loss_chart(lines: Sequence[Line], *, width: int, height: int) -> Text | None:
    """Draw losses over steps, each line in its colour, at most `width` columns wide. None while no line has two points."""
    finite = [
        (line.name, [(step, loss) for step, loss in zip(line.steps, line.losses, strict=True) if loss is not None])
        for line in lines
    ]
    drawn = [(name, points) for name, points in finite if len(points) >= _LEAST_POINTS]
    if not drawn:
        return None
    import plotext

    plotext.clear_figure()
    plotext.plotsize(width, height)
    for paint in (plotext.canvas_color, plotext.axes_color, plotext.ticks_color):
        paint("default")
    for place, (name, points) in enumerate(drawn):
        steps, losses = zip(*points, strict=True)
        # plotext reads what stands in a label as it is; the caller writes control characters out.
        plotext.plot(steps, losses, label=name, marker="braille", color=COLORS[place % len(COLORS)])
    first = min(points[0][0] for _, points in drawn)
    last = max(points[-1][0] for _, points in drawn)
    ticks = sorted({round(first + (last - first) * place / (_MOST_TICKS - 1)) for place in range(_MOST_TICKS)})
    plotext.xticks(ticks, [f"{tick:,}" for tick in ticks])
    plotext.title("loss by step")
    return Text.from_ansi(plotext.build().rstrip("\n"), no_wrap=True)
