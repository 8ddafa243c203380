# SPDX-License-Identifier: Apache-2.0
"""Compare the logprobs of a model served by vLLM with those of Hugging Face's own eager code.

Each runs in a process of its own, one after the other. The exit status is 0 if they agree, 3 if the model is
refused, 1 if they differ or cannot be compared.
"""

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_tf_sinks import parity
from vllm_tf_sinks.cli import text
from vllm_tf_sinks.parity import AGREES, DIFFERS, OFF, ON, REFUSED, Run, serve
from vllm_tf_sinks.zygote import JobError, Zygote

STATUS = {AGREES: 0, DIFFERS: 1, REFUSED: 3}
WORST = 5
CONTEXT = 4  # words shown before a token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is compared, how, and where the outcome goes."""
    defaults = ", ".join(f"{tolerance:g} for {dtype}" for dtype, tolerance in parity.TOLERANCES.items())
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder or a hub id")
    add("--revision", help="branch, tag or commit of the hub")
    add("--trust-remote-code", action="store_true", help="run code that comes with the checkpoint")
    add(
        "--dtype",
        default="auto",
        choices=["auto", *parity.TOLERANCES],
        help="of both sides (default: the checkpoint's)",
    )
    add("--prompts", type=Path, metavar="FILE", help="one prompt a line (default: built-in ones, or random tokens)")
    add("--new-tokens", type=_positive, default=16, metavar="N", help="to generate for each prompt (default: 16)")
    add("--against", choices=["off"], help="compare with the plugin turned off as well")
    tolerance = f"of the mean difference (default: {defaults}); the largest may be {parity.LARGEST} times that"
    add("--tolerance", type=float, metavar="X", help=tolerance)
    add(
        "--engine-args",
        type=json.loads,
        default={},
        metavar="JSON",
        help="of vllm.LLM: '{\"tensor_parallel_size\": 2}'",
    )
    add("--save-reference", type=Path, metavar="FILE", help="write what Hugging Face answers, and stop")
    add("--reference", type=Path, metavar="FILE", help="read that, and do not run Hugging Face")
    add("--plot", type=Path, metavar="FILE.png", help="draw the comparison (needs the extra vllm-tf-sinks[plot])")


def _positive(value: str) -> int:
    if (number := int(value)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def run(options: argparse.Namespace) -> int:
    """Run both sides, print the comparison, and return the exit status."""
    try:
        if options.plot:
            import matplotlib  # noqa: F401  # before anything takes time
        with Zygote(os.environ) as processes:
            reference = _reference(options, processes)
            if options.save_reference:
                reference.save(options.save_reference)
                print(f"Saved {len(reference.answers)} answers to {options.save_reference}", file=sys.stderr)
                return 0
            tolerance = parity.TOLERANCES[reference.dtype] if options.tolerance is None else options.tolerance
            engine = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
            engine |= {"dtype": reference.dtype, **options.engine_args}
            runs = []
            for plugin in (ON, OFF) if options.against else (ON,):
                with _progress(f"vLLM, {plugin}", "prompts") as on_progress:
                    runs.append(serve(processes, plugin, options.model, reference, tolerance, engine, on_progress))
    except JobError as error:
        print(f"{error}\n\nHugging Face cannot run {options.model}: {error.error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    if runs[0].log:
        print(runs[0].log, file=sys.stderr)
    drawn = {each.plugin: each.comparison for each in reversed(runs) if each.comparison}
    if options.plot and drawn:
        from vllm_tf_sinks.cli.plot import draw

        title = f"{Path(options.model).name}, {reference.dtype}: logprobs of vLLM against Hugging Face's"
        draw(drawn, title, options.plot)
    show = as_json if options.json else as_text
    print(show(options.model, reference, runs, tolerance))
    return STATUS[runs[0].outcome]


def _reference(options: argparse.Namespace, processes: Zygote) -> parity.Reference:
    if options.reference:
        return parity.Reference.load(options.reference)
    prompts = options.prompts.read_text().splitlines() if options.prompts else None
    with _progress("Hugging Face", "tokens") as on_progress:
        reference: parity.Reference = processes.run(
            "vllm_tf_sinks.answers:answer_with_hugging_face",
            on_progress=on_progress,
            model=options.model,
            prompts=prompts,
            new_tokens=options.new_tokens,
            dtype=options.dtype,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
    return reference


@contextmanager
def _progress(who: str, unit: str) -> Iterator[Any]:
    """A progress bar, or how long it has been while nothing is reported; gives what a job's reports go to."""
    over = threading.Event()
    starting = "{desc:<20} starting [{elapsed}]"
    with tqdm(total=1, desc=who, unit=unit, bar_format=starting, ncols=min(100, text.width()), disable=None) as bar:

        def on_progress(done_of: tuple[int, int]) -> None:
            bar.bar_format = "{desc:<20} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}]"
            bar.n, bar.total = done_of

        def keep_running() -> None:
            while not over.wait(0.2):
                bar.refresh()

        clock = threading.Thread(target=keep_running, daemon=True)
        clock.start()
        try:
            yield on_progress
            bar.n = bar.total
        finally:
            over.set()
            clock.join()


def as_json(model: str, reference: parity.Reference, runs: list[Run], tolerance: float) -> str:
    """The outcome for programs."""
    report: dict[str, Any] = {"model": model, "dtype": reference.dtype, "tolerance": tolerance, "runs": []}
    for each in runs:
        entry: dict[str, Any] = {"plugin": each.plugin, "outcome": each.outcome, "reason": each.reason}
        if each.comparison:
            entry["prompt"] = asdict(each.comparison.statistics(False))
            entry["decode"] = asdict(each.comparison.statistics(True))
            entry["worst"] = _worst(each.comparison, reference)
        report["runs"].append(entry)
    return json.dumps(report, indent=2, ensure_ascii=False)


def as_text(model: str, reference: parity.Reference, runs: list[Run], tolerance: float) -> str:
    """The outcome for a terminal."""
    prompts = [answer.prompt_length for answer in reference.answers]
    new = len(reference.answers[0].tokens) - prompts[0]
    lengths = f"{min(prompts)}" if min(prompts) == max(prompts) else f"{min(prompts)} to {max(prompts)}"
    title = f"{model}, {reference.dtype}, {len(prompts)} prompts of {lengths} tokens, {new} new tokens each"
    parts = [text.coloured(title, "bold")]
    parts += [text.heading("Differences of logprobs from Hugging Face's"), _table(runs)]
    for each in runs:
        if each.comparison and (rows := _worst(each.comparison, reference)):
            parts += [text.heading(f"Furthest apart, {each.plugin}"), text.columns([_line(row) for row in rows])]
    parts.append("")
    parts += [_verdict(each, tolerance) for each in runs]
    return "\n".join(parts)


def _table(runs: list[Run]) -> str:
    header = ("", "", "mean", "median", "90 %", "99 %", "largest", "same greedy")
    lines = [[f"{cell:>7}" if 2 <= at <= 6 else cell for at, cell in enumerate(header)]]
    parts = False
    for each in runs:
        if not each.comparison:
            lines.append([each.plugin, REFUSED, *[f"{'-':>7}"] * 5, "-"])
            continue
        for part, is_new in (("prompt", False), ("decode", True)):
            s = each.comparison.statistics(is_new)
            parts |= s.compared < s.of
            numbers = [f"{number:>7.2g}" for number in (s.mean, s.median, s.q90, s.q99, s.largest)]
            greedy = f"{s.greedy} of {s.compared}" + (f" ({s.of})" if s.compared < s.of else "")
            lines.append([each.plugin if not is_new else "", part, *numbers, greedy])
    note = "\n\n" + text.paragraph("(in all) where greedy texts part: the rest is not compared", "  ") if parts else ""
    return text.columns(lines) + note


def _worst(comparison: parity.Comparison, reference: parity.Reference) -> list[dict[str, Any]]:
    """The places that are furthest apart, in words."""
    rows = []
    for place in comparison.worst(WORST):
        prompt, position = int(comparison.prompt[place]), int(comparison.position[place])
        entry = int(comparison.differences[place].argmax())
        is_whole = comparison.reference.shape[1] > 1
        row: dict[str, Any] = {
            "difference": float(comparison.difference[place]),
            "prompt": prompt,
            "position": position,
            "part": "decode" if comparison.is_new[place] else "prompt",
            "token": entry if is_whole else reference.answers[prompt].tokens[position],
            "hugging_face": float(comparison.reference[place, entry]),
            "vllm": float(comparison.served[place, entry]),
        }
        if reference.words and not is_whole:
            words = reference.words[prompt]
            row["text"] = words[position]
            row["after"] = "".join(words[max(0, position - CONTEXT) : position])
        rows.append(row)
    return rows


def _line(row: dict[str, Any]) -> list[str]:
    where = f"{row['part']} {row['prompt'] + 1}, token {row['position'] + 1}"
    logprobs = f"{row['hugging_face']:.4g} → {row['vllm']:.4g}"
    what = f"{row['text']!r} after {row['after']!r}" if "text" in row else f"token {row['token']}"
    return [f"{row['difference']:>8.2g}", where, logprobs, what]


def _verdict(each: Run, tolerance: float) -> str:
    word, colour = {AGREES: ("Agrees", "green"), DIFFERS: ("Differs", "red"), REFUSED: ("Refused", "red")}[each.outcome]
    allowed = f"{tolerance:g} on average and {parity.LARGEST * tolerance:g} at most are allowed."
    line = text.paragraph(each.reason or allowed, f"{word}, {each.plugin}: ")
    return line.replace(word, text.coloured(word, colour), 1)
