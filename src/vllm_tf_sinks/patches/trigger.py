# SPDX-License-Identifier: Apache-2.0
"""Run something once, as soon as a module has been imported."""

import sys
from collections.abc import Callable
from types import ModuleType

import wrapt

_waiting: set[str] = set()


def when_imported(module_name: str, action: Callable[[], None]) -> None:
    """Call `action` after `module_name` is imported, or now if it is; once however often this is called.

    An import after which `action` raises fails, and so does the next one.
    """
    if module_name in _waiting:
        return
    if module_name in sys.modules:
        action()
        return
    _waiting.add(module_name)

    def imported(_module: ModuleType) -> None:
        _waiting.discard(module_name)
        try:
            action()
        except BaseException:
            # vLLM goes on after an import that fails and may try it again
            sys.modules.pop(module_name, None)
            when_imported(module_name, action)
            raise

    wrapt.register_post_import_hook(imported, module_name)
