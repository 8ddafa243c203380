# SPDX-License-Identifier: Apache-2.0
"""Apply the catalogue to this process, report on it, and take it back."""

import logging
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import CellType
from typing import Any, NamedTuple

from vllm_tf_sinks import vllm_api
from vllm_tf_sinks.broken_install import allow_models, is_broken_install, refuse_models
from vllm_tf_sinks.patches.catalogue import CATALOGUE
from vllm_tf_sinks.patches.patch import Patch, PatchError, Row, State, Target
from vllm_tf_sinks.settings import NOT_REGISTERED, VARIABLE, Settings, choose, chosen

UNTESTED = "untested version"
CHECK = "check"  # the group of patches that check a model on such a version

logger = logging.getLogger("vllm.tf_sinks")  # only loggers below `vllm` have a handler


class _Applied(NamedTuple):
    target: Target
    original: Callable[..., Any]
    replacement: Callable[..., Any]


_followed = NOT_REGISTERED  # the settings that the rows are true of
_rows: dict[str, Row] = {}
_applied: dict[str, _Applied] = {}
_made: dict[str, _Applied] = {}  # the last replacement of each row, applied or not
_logged = ""


def _follow() -> None:
    """Bring the rows up to the settings chosen since, under which those that wait for `apply()` are pending or off."""
    global _followed
    _look()
    if _followed is (settings := chosen()):
        return
    _followed = settings
    for patch in CATALOGUE:
        if patch.name not in _applied:
            _rows[patch.name] = (
                Row(patch, State.PENDING, "the Transformers backend is not imported yet")
                if patch.group in settings.groups
                else Row(patch, State.OFF, f"{VARIABLE}={settings.value}")
            )


def apply() -> None:
    """Apply each group of the catalogue that is on, whole or not at all, and log one line of what came of it.

    Raises:
        PatchError: under `VLLM_TF_SINKS=strict`, naming vLLM's version and each patch that does not fit.
        ImportError: if a package is missing that this one needs; nothing is applied then.
    """
    global _logged
    _follow()
    settings = chosen()
    misfits: list[Row] = []
    try:
        for group in sorted(settings.groups):
            misfits += _apply_group([patch for patch in CATALOGUE if patch.group == group])
    except ImportError:
        _restore()
        raise
    if misfits:
        message = f"vLLM {vllm_api.engine.version()} is not patched in full: " + "; ".join(map(str, misfits))
        if settings.strict:
            _restore()
            raise PatchError(f"{message}. {VARIABLE}=strict forbids that: use 1 to go on without these patches.")
    if settings.strict and _caveat():
        _restore()
        raise PatchError(
            f"vLLM {vllm_api.engine.version()} is an {UNTESTED}. {VARIABLE}=strict forbids that: use 1, under which "
            "each model is checked once its weights are loaded."
        )
    unchecked = [str(row) for row in misfits if row.patch.group == CHECK]
    if unchecked and not vllm_api.engine.too_old():
        refuse_models(
            f"vllm-tf-sinks was not tested on vLLM {vllm_api.engine.version()}, and cannot check its models after "
            f"loading: {'; '.join(unchecked)}"
        )
    if (line := summary()) == _logged:
        return  # register() was called again
    _logged = line
    if misfits:
        logger.warning("%s. Models that need them get wrong logprobs or do not load.", message)
    caveat = f" ({_caveat()})" if _caveat() else ""
    logger.info("vllm-tf-sinks %s on vLLM %s%s: %s", version("vllm-tf-sinks"), vllm_api.engine.version(), caveat, line)


def _apply_group(patches: list[Patch]) -> list[Row]:
    """Apply `patches` whole or not at all; returns the rows that do not fit."""
    fits: list[tuple[Patch, Target]] = []
    misfits: list[Row] = []
    for patch in patches:
        if patch.name in _applied:
            continue
        try:
            if reason := vllm_api.engine.too_old():
                raise PatchError(reason)
            if reason := patch.has():
                _rows[patch.name] = Row(patch, State.NOT_NEEDED, reason)
            else:
                fits.append((patch, patch.find()))
        except Exception as error:  # whatever a vLLM that we do not know raises
            if is_broken_install(error):
                raise
            misfits.append(Row(patch, State.DOES_NOT_FIT, _reason(error)))
    if not misfits:
        misfits = _replace(fits)
    if misfits:
        names = ", ".join(row.patch.name for row in misfits)
        _rows.update({patch.name: Row(patch, State.OFF, f"{names} does not fit") for patch, _ in fits})
    _rows.update({row.patch.name: row for row in misfits})
    return misfits


def _caveat() -> str:
    """What `status()` says of a patch that is applied to a vLLM on which it was not tested, or ""."""
    return "" if vllm_api.engine.is_tested() else UNTESTED


def _replace(fits: list[tuple[Patch, Target]]) -> list[Row]:
    """Make every replacement, then put all of them in place; returns the row that could not be made."""
    made: list[tuple[Patch, _Applied]] = []
    for patch, target in fits:
        original = target.get()
        try:
            made.append((patch, _Applied(target, original, patch.make(original))))
        except Exception as error:  # whatever vLLM's modules raise while ours import them
            if is_broken_install(error):
                raise
            return [Row(patch, State.DOES_NOT_FIT, _reason(error))]
    for patch, applied in made:
        applied.target.set(applied.replacement)
        _applied[patch.name] = _made[patch.name] = applied
        _rows[patch.name] = Row(patch, State.APPLIED, _caveat())
    return []


def _look() -> None:
    """Bring the rows up to what others did since: one who undoes a patch of theirs puts back what they found."""
    for name, applied in _made.items():
        patch, current = _rows[name].patch, applied.target.get()
        if name in _applied and any(current is function for function in _with_wrapped(applied.original)):
            del _applied[name]
            _rows[name] = Row(patch, State.OFF, "somebody else put back what was there before")
        elif name not in _applied and current is applied.replacement:
            _applied[name] = applied
            _rows[name] = Row(patch, State.APPLIED, "reverted, and put back by somebody else")


def _with_wrapped(function: Any) -> Iterator[Any]:
    """A function, and what it wraps, and what that wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"


def status() -> list[Row]:
    """Every row of the catalogue, in its order, with its state in this process."""
    _follow()
    return [_rows.get(patch.name, Row(patch, State.OFF, "register() was not called")) for patch in CATALOGUE]


def summary() -> str:
    """The states of all rows in one line, as the log has it."""
    names: dict[State, list[str]] = {}
    for row in status():
        names.setdefault(row.state, []).append(row.patch.name)
    return "; ".join(f"{state.value}: {', '.join(rows)}" for state, rows in names.items())


def revert() -> list[Row]:
    """Restore what was there before `register()`, where it is still ours, and return all rows.

    A patch that somebody wrapped since is taken out of that wrapper. Where it is held in a way that
    does not show it stays, and its row stays `applied` with the reason. Patches that wait for the
    backend's import are off, until `register()` is called again. Models that were built keep what
    they were built with.
    """
    choose(Settings("0"))
    allow_models()
    _follow()
    _rows.update({name: Row(row.patch, State.OFF, "reverted") for name, row in _rows.items() if name not in _applied})
    _restore()
    return status()


def _restore() -> None:
    for name, applied in reversed(_applied.copy().items()):
        patch = _rows[name].patch
        if _take_out(applied):
            del _applied[name]
            _rows[name] = Row(patch, State.OFF, "reverted")
        else:
            _rows[name] = Row(patch, State.APPLIED, "not reverted: somebody else replaced it since")


def _take_out(applied: _Applied) -> bool:
    """Put the original back where our replacement is held; False where it is not found."""
    wrapper = None
    for function in _with_wrapped(applied.target.get()):
        if function is applied.replacement:
            if wrapper is not None:
                return _exchange(wrapper, applied.replacement, applied.original)
            applied.target.set(applied.original)
            return True
        wrapper = function
    return False


def _exchange(wrapper: Any, held: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Let `wrapper` call `other` and not `held`; False where it does not show how it calls that."""
    if hasattr(type(wrapper), "__wrapped__"):  # a proxy, which calls what that is
        wrapper.__wrapped__ = other
        return True
    cells = [cell for cell in getattr(wrapper, "__closure__", None) or () if _contents(cell) is held]
    for cell in cells:
        cell.cell_contents = other
    if cells:
        wrapper.__wrapped__ = other
    return bool(cells)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
