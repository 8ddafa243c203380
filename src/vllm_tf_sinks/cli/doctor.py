# SPDX-License-Identifier: Apache-2.0
"""Report whether the plugin works here: versions, settings, patches, attention backends.

The exit status is 0 without problems, and 1 with any. Each problem is printed with what to do.
"""

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version

from vllm_tf_sinks import compat, hooks
from vllm_tf_sinks.cli import text
from vllm_tf_sinks.errors import PatchError
from vllm_tf_sinks.patches.patch import State
from vllm_tf_sinks.patches.patcher import status
from vllm_tf_sinks.plugin import register
from vllm_tf_sinks.settings import VALUES, VARIABLE, read_settings

GROUP, NAME = "vllm.general_plugins", "tf_sinks"  # the entry point of this package
FILTER = "VLLM_PLUGINS"

# Name in the report -> names of the distributions that may have it
PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "flashinfer": ("flashinfer-python",),
}


@dataclass(frozen=True)
class Problem:
    """A problem, and what to do about it."""

    what: str
    do: str


@dataclass
class Report:
    """The report of `doctor`.

    Attributes:
        versions: package -> its version, None if it is not installed.
        tested: whether this package was tested on this version of vLLM.
        device: vLLM's name for its device.
        variable: value and meaning of `VLLM_TF_SINKS`.
        loaded: whether vLLM would load the plugin, and why.
        patches: name, state and reason of each row of the table of patches.
        attention_backends: names of the attention backends that take sinks on this platform.
        hook_plugins: names of the installed hook plugins.
        problems: all problems.
    """

    versions: dict[str, str | None] = field(default_factory=dict)
    tested: bool = True
    device: str = ""
    variable: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, bool | str] = field(default_factory=dict)
    patches: list[dict[str, str]] = field(default_factory=list)
    attention_backends: list[str] = field(default_factory=list)
    hook_plugins: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, what: str, do: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(what, do))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor` to `parser`: it has none."""


def run(options: argparse.Namespace) -> int:
    """Examine this environment, print the report, and return the exit status."""
    report = examine()
    print(json.dumps(asdict(report), indent=2) if options.json else as_text(report))
    return int(bool(report.problems))


def examine() -> Report:
    """Examine this environment. This registers the plugin and imports vLLM's Transformers backend."""
    report = Report()
    report.versions = {
        "vllm-tf-sinks": version("vllm-tf-sinks"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "vllm": None,
        **{name: _version(*distributions) for name, distributions in PACKAGES.items()},
    }
    _examine_loading(report)
    try:
        report.versions["vllm"] = compat.engine.version()
    except ImportError as error:
        report.problem(
            f"vLLM cannot be imported: {error}.",
            "Install vLLM into the environment of this command: see its installation guide for your hardware.",
        )
        return report
    if reason := compat.engine.too_old():
        report.problem(f"{reason}, so that nothing is patched.", f"Install vLLM {compat.engine.OLDEST} or newer.")
    else:
        report.tested = compat.engine.is_tested()
    _examine_device(report)
    _examine_patches(report)
    _examine_hooks(report)
    return report


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _examine_loading(report: Report) -> None:
    """Find out whether vLLM would load the plugin: it has an entry point, and `VLLM_PLUGINS` does not exclude it."""
    allowed = os.environ.get(FILTER)
    if not entry_points(group=GROUP, name=NAME):
        report.loaded = {"yes": False, "why": f"the entry point {NAME} of {GROUP} is not installed"}
        report.problem(
            "vLLM does not find the plugin: its entry point is not installed.",
            "Install the package with pip: a folder on PYTHONPATH is not enough.",
        )
    elif allowed is None:
        report.loaded = {"yes": True, "why": f"{FILTER} is unset: vLLM loads every plugin"}
    elif NAME in allowed.split(","):
        report.loaded = {"yes": True, "why": f"{FILTER}={allowed} names it"}
    else:
        report.loaded = {"yes": False, "why": f"{FILTER}={allowed!r} leaves it out"}
        report.problem(
            f"vLLM does not load the plugin: {FILTER}={allowed!r} does not name {NAME}.",
            f"Unset {FILTER}, or set it to {','.join(filter(None, [allowed, NAME]))}.",
        )


def _examine_device(report: Report) -> None:
    try:
        report.device = compat.engine.device()
        report.attention_backends = compat.attention.backends_with_sinks()
    except Exception as error:  # a driver may raise anything
        report.problem(f"vLLM finds no device: {error}.", "Install the build of vLLM for this machine.")
        return
    if not report.attention_backends:
        report.problem(
            f"No attention backend of vLLM takes sinks on {report.device}. Models with sinks are refused.",
            "Serve models with sinks on other hardware. Other models are not affected.",
        )


def _examine_patches(report: Report) -> None:
    try:
        settings = read_settings()
        report.variable = {"value": settings.value, "meaning": VALUES[settings.value]}
        register()
        importlib.import_module(compat.engine.BACKEND)
    except PatchError:
        pass  # under strict; the rows have the reasons
    except ValueError as error:
        report.variable = {"value": os.environ[VARIABLE], "meaning": "not a valid value"}
        report.problem(str(error), "Correct the variable: vLLM does not start with this value.")
    except Exception as error:  # vLLM's modules may raise anything
        report.problem(
            f"vLLM's Transformers backend cannot be imported: {type(error).__name__}: {error}",
            "Install versions of torch, torchvision and transformers that fit each other.",
        )
    for row in status():
        reason = row.reason or row.patch.why
        report.patches.append({"name": row.patch.name, "state": row.state.value, "reason": reason})
        if row.state is State.DOES_NOT_FIT:
            report.problem(
                f"{row.patch.name} does not fit this vLLM: {row.reason}.",
                "Models that need it get wrong logprobs or do not load. Use a tested vLLM "
                f"({', '.join(compat.engine.TESTED)}), or report this with the output of doctor --json.",
            )


def _examine_hooks(report: Report) -> None:
    plugins = hooks.plugins()
    report.hook_plugins = plugins.names
    for name, why in plugins.broken.items():
        report.problem(f"The hook plugin {name!r} is disabled: {why}.", "Update or uninstall its package.")


MARKS = {
    "applied": ("✓", "green"),
    "not needed": ("✓", "green"),
    "off": ("-", "yellow"),
    "pending": ("-", "yellow"),
    "does not fit": ("✗", "red"),
}


def as_text(report: Report) -> str:
    """The report as text for a terminal."""
    facts = [(name, found or "not installed") for name, found in report.versions.items()]
    if not report.tested:
        tested = ", ".join(compat.engine.TESTED)
        facts.append(
            ("", f"This is an untested version of vLLM: each model is checked once it is loaded. Tested: {tested}.")
        )
    facts += [("device", report.device or "none")]
    parts = [text.coloured("Versions", "bold"), text.columns(facts), text.heading("Settings")]
    settings = []
    if report.variable:
        value = report.variable["value"] if os.environ.get(VARIABLE) else "unset"
        settings.append((VARIABLE, f"{value}: {report.variable['meaning']}"))
    settings.append(("loaded by vLLM", ("yes, " if report.loaded["yes"] else "no, ") + str(report.loaded["why"])))
    settings.append(("hook plugins", ", ".join(report.hook_plugins) or "none"))
    parts.append(text.columns(settings))
    if report.patches:
        rows = [(MARKS[p["state"]][0], p["name"], p["state"], p["reason"]) for p in report.patches]
        parts += [text.heading("Patches"), _with_marks(text.columns(rows))]
    if report.device:
        parts += [text.heading("Attention backends that take sinks")]
        parts += [text.paragraph(", ".join(report.attention_backends) or "none", "  ")]
    if report.problems:
        parts.append(text.heading("Problems"))
        for problem in report.problems:
            parts += [_with_marks(text.paragraph(problem.what, "  ✗ ")), text.paragraph(problem.do, "    → ")]
    else:
        parts.append("\n" + text.coloured(_no_problems(report), "green"))
    return "\n".join(parts)


def _no_problems(report: Report) -> str:
    if report.variable.get("value") == "0":
        return f"No problems, but {VARIABLE}=0 turns the plugin off."
    return "No problems: vLLM loads the plugin, and all patches fit."


def _with_marks(lines: str) -> str:
    """Colour the marks at the start of lines."""
    for mark, colour in set(MARKS.values()):
        lines = lines.replace(f"\n  {mark} ", f"\n  {text.coloured(mark, colour)} ")
        if lines.startswith(f"  {mark} "):
            lines = f"  {text.coloured(mark, colour)} " + lines.removeprefix(f"  {mark} ")
    return lines
