# SPDX-License-Identifier: Apache-2.0
"""Numbers from repeated runs, taken in turn so that all of them see the same machine."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

BLOCK = 0.02  # seconds

MET, MISSED, NOISE = "met", "**missed**", "within the noise"


@dataclass(frozen=True)
class Sample:
    """What repeated runs gave, round by round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the values lie between these."""
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, method="inclusive")
        return low, high

    def __sub__(self, other: "Sample") -> "Sample":
        """Differences within a round, which a change of the machine's speed between rounds does not affect."""
        return Sample(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))

    def __truediv__(self, other: "Sample") -> "Sample":
        """Ratios within a round."""
        return Sample(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def verdict(self, limit: float) -> str:
        """Whether it stays below `limit`: half of the values must lie on one side with both quartiles."""
        low, high = self.quartiles
        return MET if high <= limit else MISSED if low > limit else NOISE

    def text(self, pattern: str, factor: float = 1) -> str:
        """The median and the quartiles."""
        low, high = self.quartiles
        return f"{factor * self.median:{pattern}} ({factor * low:{pattern}} to {factor * high:{pattern}})"


def seconds_a_call(function: Callable[..., Any], *args: Any, calls: int, **kwargs: Any) -> float:
    """The mean of at most `calls` calls, on as many cores as torch uses.

    Calls that take long are fewer: a block of them takes no longer than BLOCK.
    """
    import torch
    from torch.utils.benchmark import Timer

    names = {"function": function, "args": args, "kwargs": kwargs}
    timer = Timer("function(*args, **kwargs)", globals=names, num_threads=torch.get_num_threads())
    once = timer.timeit(1).mean
    return float(timer.timeit(max(1, min(calls, int(BLOCK / once)))).mean)


def use_one_core() -> None:
    """In a job: let torch use one core from here on."""
    from torch._C import set_num_threads  # a worker of vLLM's on a CPU disables torch.set_num_threads

    set_num_threads(1)


def in_turn(runs: Mapping[str, Callable[[], float]], rounds: int, title: str = "") -> dict[str, Sample]:
    """What each of `runs` returns in each of `rounds`; every other round goes backwards, so that a drift cancels.

    Args:
        title: of a progress bar; none is shown without.
    """
    values: dict[str, list[float]] = {name: [] for name in runs}
    with tqdm(total=rounds * len(runs), desc=title, leave=False, disable=not title) as bar:
        for number in range(rounds):
            for name in list(runs)[:: -1 if number % 2 else 1]:
                values[name].append(runs[name]())
                bar.update()
    return {name: Sample(tuple(numbers)) for name, numbers in values.items()}
