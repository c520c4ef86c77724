"""What the user of `aerostat up` reads. Lines, not a screen: they stay readable in a log."""

from rich.console import Console


class Voice:
    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def warn(self, line: str) -> None:
        self._console.print(line, style="yellow", markup=False)

    def fail(self, line: str) -> None:
        self._console.print(line, style="red", markup=False)
