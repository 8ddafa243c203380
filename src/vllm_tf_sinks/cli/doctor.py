# SPDX-License-Identifier: Apache-2.0
"""Say whether the plugin works here: versions, patches, settings, attention backends.

The exit status is 0 if all is well, 1 if something will not work; what to do is printed then.
"""

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version

from vllm_tf_sinks import hooks, vllm_api
from vllm_tf_sinks.cli import text
from vllm_tf_sinks.patches.apply import status
from vllm_tf_sinks.patches.patch import PatchError, State
from vllm_tf_sinks.plugin import register
from vllm_tf_sinks.settings import VALUES, VARIABLE, read_settings

GROUP, NAME = "vllm.general_plugins", "tf_sinks"  # our entry point
FILTER = "VLLM_PLUGINS"

# What is shown -> names of the distribution, of which one may be installed
PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "flashinfer": ("flashinfer-python",),
}


@dataclass(frozen=True)
class Problem:
    """Something that will not work, and what to do about it."""

    what: str
    do: str


@dataclass
class Report:
    """What `doctor` finds.

    Attributes:
        versions: of each package, None where it is missing.
        tested: whether this package was tested on this version of vLLM.
        device: vLLM's name for what it runs on.
        variable: value and meaning of `VLLM_TF_SINKS`.
        loaded: whether vLLM would load the plugin, and why.
        patches: name, state and reason of each row of the catalogue.
        attention_backends: names of those that take sinks here.
        hook_plugins: names of the plugins of this plugin.
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
        """Note that something will not work."""
        self.problems.append(Problem(what, do))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def run(options: argparse.Namespace) -> int:
    """Examine this environment, print what was found, and return the exit status."""
    report = examine()
    print(json.dumps(asdict(report), indent=2) if options.json else as_text(report))
    return int(bool(report.problems))


def examine() -> Report:
    """What is here, with the plugin registered and the backend imported in this process."""
    report = Report()
    report.versions = {
        "vllm-tf-sinks": version("vllm-tf-sinks"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "vllm": None,
        **{name: _version(*distributions) for name, distributions in PACKAGES.items()},
    }
    _examine_loading(report)
    try:
        report.versions["vllm"] = vllm_api.engine.version()
    except ImportError as error:
        report.problem(
            f"vLLM cannot be imported: {error}.",
            "Install vLLM into the environment of this command: see its installation guide for your hardware.",
        )
        return report
    if reason := vllm_api.engine.too_old():
        report.problem(f"{reason}, and nothing is patched.", f"Install vLLM {vllm_api.engine.OLDEST} or newer.")
    else:
        report.tested = vllm_api.engine.is_tested()
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
    """Whether vLLM would load the plugin: by its entry point, if `VLLM_PLUGINS` lets it."""
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
        report.device = vllm_api.engine.device()
        report.attention_backends = vllm_api.attention.backends_with_sinks()
    except Exception as error:  # whatever drivers raise
        report.problem(f"vLLM finds no device: {error}.", "Install the build of vLLM for this machine.")
        return
    if not report.attention_backends:
        report.problem(
            f"No attention backend of vLLM takes sinks on {report.device}: models that have them are refused.",
            "Serve such models on other hardware; models without sinks are not affected.",
        )


def _examine_patches(report: Report) -> None:
    try:
        settings = read_settings()
        report.variable = {"value": settings.value, "meaning": VALUES[settings.value]}
        register()
        importlib.import_module(vllm_api.engine.BACKEND)
    except PatchError:
        pass  # under strict; the rows say why
    except ValueError as error:
        report.variable = {"value": os.environ[VARIABLE], "meaning": "not a value that it takes"}
        report.problem(str(error), "vLLM does not start with it.")
    except Exception as error:  # whatever vLLM's modules raise
        report.problem(
            f"vLLM's Transformers backend cannot be imported: {type(error).__name__}: {error}",
            "Check that torch, torchvision and transformers belong together.",
        )
    for row in status():
        reason = row.reason or row.patch.why
        report.patches.append({"name": row.patch.name, "state": row.state.value, "reason": reason})
        if row.state is State.DOES_NOT_FIT:
            report.problem(
                f"{row.patch.name} does not fit this vLLM: {row.reason}.",
                "Models that need it get wrong logprobs or do not load. Use a tested vLLM "
                f"({', '.join(vllm_api.engine.TESTED)}), or report this with the output of doctor --json.",
            )


def _examine_hooks(report: Report) -> None:
    plugins = hooks.plugins()
    report.hook_plugins = plugins.names
    for name, why in plugins.broken.items():
        report.problem(f"The plugin {name!r} of this plugin is left out: {why}.", "Update or uninstall its package.")


MARKS = {
    "applied": ("✓", "green"),
    "not needed": ("✓", "green"),
    "off": ("-", "yellow"),
    "pending": ("-", "yellow"),
    "does not fit": ("✗", "red"),
}


def as_text(report: Report) -> str:
    """The report for a terminal."""
    facts = [(name, found or "not installed") for name, found in report.versions.items()]
    if not report.tested:
        tested = ", ".join(vllm_api.engine.TESTED)
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
        parts += [text.heading("Attention backends that take sinks here")]
        parts += [text.paragraph(", ".join(report.attention_backends) or "none", "  ")]
    if report.problems:
        parts.append(text.heading("What will not work"))
        for problem in report.problems:
            parts += [_with_marks(text.paragraph(problem.what, "  ✗ ")), text.paragraph(problem.do, "    → ")]
    else:
        parts.append("\n" + text.coloured(_all_well(report), "green"))
    return "\n".join(parts)


def _all_well(report: Report) -> str:
    if report.variable.get("value") == "0":
        return f"Nothing is wrong, but {VARIABLE}=0 turns the plugin off."
    return "All is well: vLLM loads the plugin, and it fits."


def _with_marks(lines: str) -> str:
    """Colour the marks at the start of lines."""
    for mark, colour in set(MARKS.values()):
        lines = lines.replace(f"\n  {mark} ", f"\n  {text.coloured(mark, colour)} ")
        if lines.startswith(f"  {mark} "):
            lines = f"  {text.coloured(mark, colour)} " + lines.removeprefix(f"  {mark} ")
    return lines
