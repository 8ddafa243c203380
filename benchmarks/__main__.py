# SPDX-License-Identifier: Apache-2.0
"""Measure everything, print one table, and write docs/performance.md.

python -m benchmarks                     # about half an hour on 2 quiet cores
python -m benchmarks startup logits      # these anew; the page keeps the rest
python -m benchmarks --small             # every code path on tiny models; writes nothing
"""

import argparse
import importlib
import tempfile
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from benchmarks import report
from benchmarks.lab import FULL, NEWER, OLDER, SMALL, Lab, Sizes, machine

SUBJECTS = ["startup", "logits", "memory", "attention", "throughput", "compiled", "sharded"]


def measure(subjects: list[str], sizes: Sizes, newer: str, older: str) -> dict[str, report.Section]:
    """The sections of `subjects`, each kept as soon as it is there."""
    sections = {}
    with tempfile.TemporaryDirectory() as scratch, Lab(sizes, Path(scratch), newer, older) as lab:
        for subject in (bar := tqdm(subjects)):
            bar.set_description(subject)
            sections[subject] = section = importlib.import_module(f"benchmarks.{subject}").measure(lab)
            section.machine = machine(lab)
            if sizes is not SMALL:
                report.keep(subject, section)
    return sections


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("subjects", nargs="*", choices=[[], *SUBJECTS], default=[], help="all of them if none is named")
    parser.add_argument("--small", action="store_true", help="tiny models, one round; writes nothing")
    parser.add_argument("--rounds", type=int, default=FULL.rounds, help="of what takes seconds (%(default)s)")
    parser.add_argument("--newer", default=NEWER, help="the vLLM to measure (%(default)s)")
    parser.add_argument("--older", default=OLDER, help="one without sinks of its own (%(default)s)")
    options = parser.parse_args()
    sizes = SMALL if options.small else replace(FULL, rounds=options.rounds)
    sections = measure(options.subjects or SUBJECTS, sizes, options.newer, options.older)
    if not options.small:
        sections = report.load()
        report.write_page(sections)
    print(report.figures(sections))


if __name__ == "__main__":
    main()
