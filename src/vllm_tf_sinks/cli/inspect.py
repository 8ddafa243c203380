# SPDX-License-Identifier: Apache-2.0
"""Stub."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Stub."""


def run(options: argparse.Namespace) -> int:
    """Stub."""
    return 1
