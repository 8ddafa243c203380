# SPDX-License-Identifier: Apache-2.0
"""Apply the table of patches to this process, report on it, and take it back."""

import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from vllm_tf_sinks import compat
from vllm_tf_sinks.broken_install import allow_models, is_broken_install, refuse_models
from vllm_tf_sinks.errors import PatchError
from vllm_tf_sinks.patches.patch import Patch, Row, State, Target
from vllm_tf_sinks.patches.table import PATCHES
from vllm_tf_sinks.settings import NOT_REGISTERED, VARIABLE, Settings, choose, chosen

UNTESTED = "untested version"
CHECK = "check"  # the group of patches that check a model on such a version

logger = logging.getLogger("vllm.tf_sinks")  # only loggers below `vllm` have a handler


class _Applied(NamedTuple):
    target: Target
    original: Callable[..., Any]
    replacement: Callable[..., Any]


class Patcher:
    """The patches of one process and their states."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.patches = patches
        self._settings = NOT_REGISTERED  # the settings under which the rows were made
        self._rows: dict[str, Row] = {}
        self._applied: dict[str, _Applied] = {}
        self._made: dict[str, _Applied] = {}  # the last replacement of each patch, applied or not
        self._logged = ""

    def apply(self) -> None:
        """Apply each group of patches that is on, whole or not at all, and log one line about the outcome.

        Raises:
            PatchError: under `VLLM_TF_SINKS=strict`, naming vLLM's version and each patch that does not fit.
            ImportError: if a package is missing that this one needs. Nothing is applied then.
        """
        self._update()
        settings = chosen()
        misfits: list[Row] = []
        try:
            for group in sorted(settings.groups):
                misfits += self._apply_group([patch for patch in self.patches if patch.group == group])
        except ImportError:
            self._restore()
            raise
        if problem := _problem_under_strict(misfits) if settings.strict else "":
            self._restore()
            raise PatchError(problem)
        unchecked = [str(row) for row in misfits if row.patch.group == CHECK]
        if unchecked and not compat.engine.too_old():
            refuse_models(
                f"vllm-tf-sinks was not tested on vLLM {compat.engine.version()}, and cannot check its models after "
                f"loading: {'; '.join(unchecked)}"
            )
        if (line := self.summary()) == self._logged:
            return  # register() was called again
        self._logged = line
        if misfits:
            logger.warning("%s. Models that need them get wrong logprobs or do not load.", _incomplete(misfits))
        note = f" ({_note()})" if _note() else ""
        logger.info("vllm-tf-sinks %s on vLLM %s%s: %s", version("vllm-tf-sinks"), compat.engine.version(), note, line)

    def status(self) -> list[Row]:
        """Every row of the table, in its order, with its state in this process."""
        self._update()
        return [
            self._rows.get(patch.name, Row(patch, State.OFF, "register() was not called")) for patch in self.patches
        ]

    def summary(self) -> str:
        """The states of all rows in one line, as the log has it."""
        names: dict[State, list[str]] = {}
        for row in self.status():
            names.setdefault(row.state, []).append(row.patch.name)
        return "; ".join(f"{state.value}: {', '.join(rows)}" for state, rows in names.items())

    def revert(self) -> list[Row]:
        """Restore what was there before `register()`, and return all rows.

        A patch that another plugin has wrapped or replaced since stays: its row is still `applied`, and says so.
        Patches that wait for the backend's import are off until `register()` is called again. Models that were
        built keep what they were built with.
        """
        choose(Settings("0"))
        allow_models()
        self._update()
        for name, row in self._rows.items():
            if name not in self._applied:
                self._rows[name] = Row(row.patch, State.OFF, "reverted")
        self._restore()
        return self.status()

    def _update(self) -> None:
        """Bring the rows up to the settings, and to what other plugins did since."""
        self._look_at_targets()
        if self._settings is (settings := chosen()):
            return
        self._settings = settings
        for patch in self.patches:
            if patch.name not in self._applied:
                self._rows[patch.name] = (
                    Row(patch, State.PENDING, "the Transformers backend is not imported yet")
                    if patch.group in settings.groups
                    else Row(patch, State.OFF, f"{VARIABLE}={settings.value}")
                )

    def _look_at_targets(self) -> None:
        """Bring the rows up to what other plugins did: one that is undone puts back what it found."""
        for name, applied in self._made.items():
            patch, current = self._rows[name].patch, applied.target.get()
            if name in self._applied and any(current is function for function in _with_wrapped(applied.original)):
                del self._applied[name]
                self._rows[name] = Row(patch, State.OFF, "another plugin put back what was there before")
            elif name not in self._applied and current is applied.replacement:
                self._applied[name] = applied
                self._rows[name] = Row(patch, State.APPLIED, "reverted, and put back by another plugin")

    def _apply_group(self, patches: list[Patch]) -> list[Row]:
        """Apply `patches` whole or not at all; returns the rows that do not fit."""
        fits: list[tuple[Patch, Target]] = []
        misfits: list[Row] = []
        for patch in patches:
            if patch.name in self._applied:
                continue
            try:
                if reason := compat.engine.too_old():
                    raise PatchError(reason)
                if reason := patch.has():
                    self._rows[patch.name] = Row(patch, State.NOT_NEEDED, reason)
                else:
                    fits.append((patch, patch.find()))
            except Exception as error:  # an unknown vLLM may raise anything
                misfits.append(_misfit(patch, error))
        if not misfits:
            misfits = self._replace(fits)
        if misfits:
            names = ", ".join(row.patch.name for row in misfits)
            self._rows.update({patch.name: Row(patch, State.OFF, f"{names} does not fit") for patch, _ in fits})
        self._rows.update({row.patch.name: row for row in misfits})
        return misfits

    def _replace(self, fits: list[tuple[Patch, Target]]) -> list[Row]:
        """Make every replacement, then put all of them in place; returns the row that could not be made."""
        made: list[tuple[Patch, _Applied]] = []
        for patch, target in fits:
            original = target.get()
            try:
                made.append((patch, _Applied(target, original, patch.make(original))))
            except Exception as error:  # vLLM's modules may raise anything while ours import them
                return [_misfit(patch, error)]
        for patch, applied in made:
            applied.target.set(applied.replacement)
            self._applied[patch.name] = self._made[patch.name] = applied
            self._rows[patch.name] = Row(patch, State.APPLIED, _note())
        return []

    def _restore(self) -> None:
        for name, applied in reversed(self._applied.copy().items()):
            patch = self._rows[name].patch
            if applied.target.get() is applied.replacement:
                applied.target.set(applied.original)
                del self._applied[name]
                self._rows[name] = Row(patch, State.OFF, "reverted")
            else:
                reason = "not reverted: another plugin wrapped or replaced it since. Undo that plugin first"
                self._rows[name] = Row(patch, State.APPLIED, reason)


def _problem_under_strict(misfits: list[Row]) -> str:
    """Why `VLLM_TF_SINKS=strict` does not go on, or ""."""
    if misfits:
        return f"{_incomplete(misfits)}. {VARIABLE}=strict forbids that: use 1 to go on without these patches."
    if note := _note():
        return (
            f"vLLM {compat.engine.version()} is an {note}. {VARIABLE}=strict forbids that: use 1, under which each "
            "model is checked once its weights are loaded."
        )
    return ""


def _incomplete(misfits: list[Row]) -> str:
    return f"vLLM {compat.engine.version()} is not patched in full: " + "; ".join(map(str, misfits))


def _note() -> str:
    """What a row says of a patch that is applied to a vLLM on which it was not tested, or ""."""
    return "" if compat.engine.is_tested() else UNTESTED


def _misfit(patch: Patch, error: Exception) -> Row:
    """The row of a patch that cannot be applied because of `error`.

    Raises:
        ImportError: the error itself, if a package is missing that this one needs.
    """
    if is_broken_install(error):
        raise error
    return Row(
        patch, State.DOES_NOT_FIT, str(error) if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"
    )


def _with_wrapped(function: Any) -> Iterator[Any]:
    """A function, what it wraps, and what that wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


_patcher = Patcher(PATCHES)  # of this process
apply, revert, status, summary = _patcher.apply, _patcher.revert, _patcher.status, _patcher.summary
