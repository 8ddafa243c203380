# SPDX-License-Identifier: Apache-2.0
"""Compare the logprobs of a model served by vLLM with those of Hugging Face's eager code.

Hugging Face and vLLM run in separate processes, one after the other. The exit status is 0 if the logprobs agree, 3 if
vLLM or the plugin refuses the model, and 1 if the logprobs differ or cannot be compared.
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

from vllm_tf_sinks.cli import text
from vllm_tf_sinks.parity import compare
from vllm_tf_sinks.parity.compare import AGREES, DIFFERS, OFF, ON, REFUSED, Run, run_vllm
from vllm_tf_sinks.parity.fork_server import ForkServer, JobError

STATUS = {AGREES: 0, DIFFERS: 1, REFUSED: 3}
WORST = 5
CONTEXT = 4  # words shown before a token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `verify` to `parser`."""
    defaults = ", ".join(f"{tolerance:g} for {dtype}" for dtype, tolerance in compare.TOLERANCES.items())
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder or a hub id")
    add("--revision", help="branch, tag or commit on the hub")
    add("--trust-remote-code", action="store_true", help="run the code of the checkpoint")
    add(
        "--dtype",
        default="auto",
        choices=["auto", *compare.TOLERANCES],
        help="dtype of the model in both (default: the checkpoint's)",
    )
    prompts = "file with one prompt per line (default: built-in prompts, or random tokens without a tokenizer)"
    add("--prompts", type=Path, metavar="FILE", help=prompts)
    new_tokens = "number of tokens to generate for each prompt (default: 16)"
    add("--new-tokens", type=_positive, default=16, metavar="N", help=new_tokens)
    add("--against", choices=["off"], help="also compare vLLM with the plugin off")
    tolerance = (
        f"largest mean difference in nats that agrees (default: {defaults}); a single difference may be "
        f"{compare.LARGEST} times that"
    )
    add("--tolerance", type=float, metavar="X", help=tolerance)
    add(
        "--engine-args",
        type=json.loads,
        default={},
        metavar="JSON",
        help="arguments of vllm.LLM: '{\"tensor_parallel_size\": 2}'",
    )
    add("--save-reference", type=Path, metavar="FILE", help="write Hugging Face's logprobs to this file, and stop")
    add("--reference", type=Path, metavar="FILE", help="read Hugging Face's logprobs from a file of --save-reference")
    add("--plot", type=Path, metavar="FILE.png", help="plot the comparison (needs the extra vllm-tf-sinks[plot])")


def _positive(value: str) -> int:
    if (number := int(value)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def run(options: argparse.Namespace) -> int:
    """Run Hugging Face and vLLM, print the comparison, and return the exit status."""
    try:
        if options.plot:
            import matplotlib  # noqa: F401  # fails before the models run
        with ForkServer(os.environ) as processes:
            reference = _reference(options, processes)
            if options.save_reference:
                reference.save(options.save_reference)
                print(
                    f"Saved the logprobs of {len(reference.sequences)} prompts to {options.save_reference}",
                    file=sys.stderr,
                )
                return 0
            tolerance = compare.TOLERANCES[reference.dtype] if options.tolerance is None else options.tolerance
            engine = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
            engine |= {"dtype": reference.dtype, **options.engine_args}
            runs = []
            for plugin in (ON, OFF) if options.against else (ON,):
                with _progress(f"vLLM, {plugin}", "prompts") as on_progress:
                    runs.append(run_vllm(processes, plugin, options.model, reference, tolerance, engine, on_progress))
    except JobError as error:
        print(f"{error}\n\nHugging Face could not run {options.model}: {error.error}", file=sys.stderr)
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


def _reference(options: argparse.Namespace, processes: ForkServer) -> compare.Reference:
    if options.reference:
        return compare.Reference.load(options.reference)
    prompts = options.prompts.read_text().splitlines() if options.prompts else None
    with _progress("Hugging Face", "tokens") as on_progress:
        reference: compare.Reference = processes.run(
            "vllm_tf_sinks.parity.logprobs:hugging_face_logprobs",
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
    """Show a progress bar, or the elapsed time before the first report; yields the function for a job's reports."""
    done = threading.Event()
    starting = "{desc:<20} starting [{elapsed}]"
    with tqdm(total=1, desc=who, unit=unit, bar_format=starting, ncols=min(100, text.width()), disable=None) as bar:

        def on_progress(done_of: tuple[int, int]) -> None:
            bar.bar_format = "{desc:<20} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}]"
            bar.n, bar.total = done_of

        def keep_running() -> None:
            while not done.wait(0.2):
                bar.refresh()

        clock = threading.Thread(target=keep_running, daemon=True)
        clock.start()
        try:
            yield on_progress
            bar.n = bar.total
        finally:
            done.set()
            clock.join()


def as_json(model: str, reference: compare.Reference, runs: list[Run], tolerance: float) -> str:
    """The outcome as JSON."""
    report: dict[str, Any] = {"model": model, "dtype": reference.dtype, "tolerance": tolerance, "runs": []}
    for each in runs:
        entry: dict[str, Any] = {"plugin": each.plugin, "outcome": each.outcome, "reason": each.reason}
        if each.comparison:
            entry["prompt"] = asdict(each.comparison.statistics(False))
            entry["decode"] = asdict(each.comparison.statistics(True))
            entry["worst"] = _worst(each.comparison, reference)
        report["runs"].append(entry)
    return json.dumps(report, indent=2, ensure_ascii=False)


def as_text(model: str, reference: compare.Reference, runs: list[Run], tolerance: float) -> str:
    """The outcome as text for a terminal."""
    prompts = [sequence.prompt_length for sequence in reference.sequences]
    new = len(reference.sequences[0].tokens) - prompts[0]
    lengths = f"{min(prompts)}" if min(prompts) == max(prompts) else f"{min(prompts)} to {max(prompts)}"
    title = f"{model}, {reference.dtype}, {len(prompts)} prompts of {lengths} tokens, {new} new tokens each"
    parts = [text.coloured(title, "bold")]
    parts += [text.heading("Absolute differences from Hugging Face's logprobs"), _table(runs)]
    for each in runs:
        if each.comparison and (rows := _worst(each.comparison, reference)):
            parts += [text.heading(f"Largest differences, {each.plugin}"), text.columns([_line(row) for row in rows])]
    parts.append("")
    parts += [_verdict(each, tolerance) for each in runs]
    return "\n".join(parts)


def _table(runs: list[Run]) -> str:
    header = ("", "", "mean", "median", "90 %", "99 %", "largest", "same greedy")
    lines = [[f"{cell:>7}" if 2 <= at <= 6 else cell for at, cell in enumerate(header)]]
    is_partial = False
    for each in runs:
        if not each.comparison:
            lines.append([each.plugin, REFUSED, *[f"{'-':>7}"] * 5, "-"])
            continue
        for part, is_new in (("prompt", False), ("decode", True)):
            s = each.comparison.statistics(is_new)
            is_partial |= s.compared < s.of
            numbers = [f"{number:>7.2g}" for number in (s.mean, s.median, s.q90, s.q99, s.largest)]
            greedy = f"{s.greedy} of {s.compared}" + (f" ({s.of})" if s.compared < s.of else "")
            lines.append([each.plugin if not is_new else "", part, *numbers, greedy])
    note = "In parentheses: the number of all tokens. Those after a difference of the greedy texts are not compared."
    return text.columns(lines) + ("\n\n" + text.paragraph(note, "  ") if is_partial else "")


def _worst(comparison: compare.Comparison, reference: compare.Reference) -> list[dict[str, Any]]:
    """The places with the largest differences, as rows of the JSON report."""
    rows = []
    for place in comparison.worst(WORST):
        prompt, position = int(comparison.prompt[place]), int(comparison.position[place])
        entry = int(comparison.differences[place].argmax())
        has_all_tokens = comparison.reference.shape[1] > 1
        row: dict[str, Any] = {
            "difference": float(comparison.difference[place]),
            "prompt": prompt,
            "position": position,
            "part": "decode" if comparison.is_new[place] else "prompt",
            "token": entry if has_all_tokens else reference.sequences[prompt].tokens[position],
            "hugging_face": float(comparison.reference[place, entry]),
            "vllm": float(comparison.served[place, entry]),
        }
        if reference.words and not has_all_tokens:
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
    allowed = f"{tolerance:g} on average and {compare.LARGEST * tolerance:g} at most are allowed."
    line = text.paragraph(each.reason or allowed, f"{word}, {each.plugin}: ")
    return line.replace(word, text.coloured(word, colour), 1)
