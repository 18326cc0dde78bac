"""A live display that stays whole when its terminal becomes narrower."""

from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment, SegmentLines


class Redrawn:
    """Remembers the lines of a drawing, to erase all of them after the terminal has wrapped them.

    Terminals wrap the lines on screen when they become narrower, but rich only moves up by the
    number of lines that it wrote.
    """

    def __init__(self, console: Console, draw: Callable[[], RenderableType]):
        self._console, self._draw = console, draw
        self._widths: list[int] = []

    def __call__(self) -> RenderableType:
        """Return the drawing; Live calls this before it moves up and writes."""
        width = self._console.width
        wrapped = sum((max(1, each) - 1) // width for each in self._widths)
        up = (ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)
        if wrapped:
            self._console.control(Control(*(up * wrapped)))
            self._widths = []
        return self

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._draw(), options, pad=False)
        self._widths = [Segment.get_line_length(line) for line in lines]
        yield SegmentLines(lines, new_lines=True)


def live_display(console: Console, draw: Callable[[], RenderableType]) -> Live:
    """Return a display that calls `draw` four times a second."""
    shown = Redrawn(console, draw)
    return Live(get_renderable=shown, console=console, refresh_per_second=4)
