"""How every bench reports: progress on stderr, a table for people, one JSON object as the last line of stdout.

A figure is a ratio of two things measured in one run, both sides interleaved; a value is the median of the runs, min and
max stand beside it. A figure that could not be measured is null with its reason under "missing".
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


def is_quick() -> bool:
    """QUICK=1: fewer runs of the same code."""
    return os.environ.get("QUICK") == "1"


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a bench talks to a person


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What `conventions.md` asks of a key: at most or at least `bound`."""

    key: str
    bound: float
    at_most: bool

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


@dataclass(slots=True, kw_only=True)
class Report:
    """Collects figures of one bench; `finish` prints them."""

    bench: str
    runs: int
    targets: Sequence[Target]
    figures: dict[str, float | None] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    baseline: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, samples: Sequence[float], *, baseline: dict[str, Any] | None = None) -> None:
        """One figure from its samples, one per run."""
        self.figures[key] = round(statistics.median(samples), 4)
        self.spread[key] = (round(min(samples), 4), round(max(samples), 4))
        self.baseline.update(baseline or {})

    def miss(self, key: str, why: str) -> None:
        self.figures[key] = None
        self.missing[key] = why

    def finish(self) -> None:
        known = {t.key: t for t in self.targets}
        for key in known.keys() - self.figures.keys():
            self.miss(key, "not measured in this run")
        rows = [("figure", "median", "min", "max", "target", "")]
        for key, value in self.figures.items():
            target = known.get(key)
            if value is None:
                rows.append((key, "-", "-", "-", str(target or ""), self.missing[key]))
                continue
            low, high = self.spread[key]
            verdict = "" if target is None else ("met" if target.is_met(value) else "missed")
            rows.append((key, f"{value:g}", f"{low:g}", f"{high:g}", str(target or "reported"), verdict))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())  # noqa: T201
        result = {
            "bench": self.bench,
            "runs": self.runs,
            "figures": self.figures,
            "spread": self.spread,
            "baseline": self.baseline,
            **({"missing": self.missing} if self.missing else {}),
        }
        print(json.dumps(result))  # noqa: T201


def interleave(runs: int, sides: dict[str, Callable[[], float]], *, warm_up: int = 1) -> dict[str, list[float]]:
    """Run all sides in turn, A B A B ..., after `warm_up` uncounted turns; samples per side in run order."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warm_up + runs):
        for name, side in sides.items():
            value = side()
            if turn >= warm_up:
                samples[name].append(value)
    return samples


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Pair by pair, so that a machine that drifts does not shift the ratio."""
    return [a / b for a, b in zip(above, below, strict=True)]
