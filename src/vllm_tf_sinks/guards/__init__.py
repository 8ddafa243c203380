# SPDX-License-Identifier: Apache-2.0
"""Refuse, while a model is built, what vLLM would drop without a word: masks, scales, windows, states."""
