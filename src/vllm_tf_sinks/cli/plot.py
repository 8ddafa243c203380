# SPDX-License-Identifier: Apache-2.0
"""Plot comparisons: vLLM's logprobs against Hugging Face's, and their differences by position."""

from pathlib import Path

import matplotlib
import numpy as np

from vllm_tf_sinks.parity.compare import Comparison

matplotlib.use("Agg")  # without a window
from matplotlib import pyplot as plt

PARTS = ((False, "prompt", "tab:blue"), (True, "decode", "tab:orange"))
SMALLEST = 1e-8  # plotted for a difference of 0, which a logarithmic scale does not have


def draw(comparisons: dict[str, Comparison], title: str, path: Path) -> None:
    """Write a plot to the file `path`.

    Args:
        comparisons: name -> comparison; each has a column of the plot.
        title: the title of the plot.
        path: the file to write.
    """
    figure, axes = plt.subplots(
        2,
        len(comparisons),
        figsize=(5.5 * len(comparisons) + 0.5, 8.5),
        squeeze=False,
        sharex="row",
        sharey="row",
        layout="constrained",
    )
    sides = [side for comparison in comparisons.values() for side in (comparison.reference, comparison.served)]
    lowest = 1.05 * min(float(np.nanmin(side)) for side in sides)
    for column, (name, comparison) in enumerate(comparisons.items()):
        above, below = axes[0, column], axes[1, column]
        above.plot([lowest, 0], [lowest, 0], color="0.7", linewidth=1, zorder=0)
        for is_new, part, colour in PARTS:
            chosen = comparison.is_new == is_new
            mean = comparison.statistics(is_new).mean
            style = {"s": 14, "alpha": 0.7, "color": colour, "linewidths": 0}
            above.scatter(comparison.reference[chosen, 0], comparison.served[chosen, 0], label=part, **style)
            difference = np.maximum(comparison.difference[chosen], SMALLEST)
            below.scatter(comparison.position[chosen], difference, label=f"{part}, mean {mean:.2g}", **style)
        above.set(title=name, xlabel="logprob of Hugging Face", ylabel="logprob of vLLM" if column == 0 else "")
        above.set(xlim=(lowest, 0), ylim=(lowest, 0), aspect="equal")
        above.legend(loc="upper left")
        label = f"absolute difference (0 is drawn at {SMALLEST:g})" if column == 0 else ""
        below.set(xlabel="position of the token", ylabel=label, yscale="log")
        below.legend(loc="best")
        for axis in (above, below):
            axis.grid(alpha=0.25)
    figure.suptitle(title, wrap=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
